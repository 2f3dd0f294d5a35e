"""`/v1/chat/completions` through the real command, on a Llama with its own chat template."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.chat_templates import LLAMA3
from tests.families import CASES, save_family
from tests.processes import completion_line, nightjar, read_lines, write_lines

CHAT = [{"role": "system", "content": "짧게"}, {"role": "user", "content": "안녕"}]


def chat_line(custom_id: str, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": CHAT, "max_tokens": 8, "temperature": 0, **body},
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = save_family(tmp_path / "model", CASES["llama, yarn"])
    template = LLAMA3.replace("<|start_header_id|>", "[").replace("<|end_header_id|>", "]")
    template = template.replace("<|eot_id|>", "").replace('"Today Date: " + date_string', '""')
    (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.mark.slow
def test_a_chat_is_the_completion_of_its_rendered_prompt(model: Path, tmp_path: Path) -> None:
    written = AutoTokenizer.from_pretrained(model).apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )
    lines = [
        chat_line("chat"),
        completion_line("plain", prompt=written, max_tokens=8, temperature=0),
        chat_line("refused", messages=[{"role": "손님", "content": "?"}]),
    ]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    done = nightjar("run", source, "--model", model, "--out", out, "--dtype", "fp32")
    bodies = {line["custom_id"]: line["response"]["body"] for line in read_lines(out)}
    assert bodies.keys() == {"chat", "plain"}, done.stderr
    chat, plain = bodies["chat"], bodies["plain"]
    assert chat["object"] == "chat.completion"
    assert chat["id"].startswith("chatcmpl-")
    [choice], [same] = chat["choices"], plain["choices"]
    assert choice["message"] == {"role": "assistant", "content": same["text"]}
    assert same["text"]
    assert (choice["finish_reason"], choice["index"]) == (same["finish_reason"], 0)
    assert chat["usage"] == plain["usage"]
    [refused] = read_lines(tmp_path / "out.errors.jsonl")
    assert refused["custom_id"] == "refused"
    assert "Unknown role: 손님" in refused["response"]["body"]["error"]["message"]
