"""`nightjar run` with LoRA adapters: each line's answer is that of its own merged model."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.adapters import gpt2_sizes, merge, save_adapter
from tests.models import save_gpt2, save_tokenizer
from tests.processes import nightjar

SIZES = gpt2_sizes(2, 32, 128)
PROMPTS = ["안녕하세요, 반갑습니다", "리뷰: 정말 재미있다", "The quick brown fox"]


def run(model: Path, lines: Path, out: Path, *options: str) -> dict[str, dict[str, Any]]:
    command = ["run", str(lines), "--model", str(model), "--out", str(out), "--dtype", "fp32"]
    done = nightjar(*command, "--accept-any-model", *options)
    assert done.returncode == 0, done.stderr
    rows = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    return {row["custom_id"]: row["response"]["body"] for row in rows}


def write(path: Path, adapters: list[str | None]) -> Path:
    rows = []
    for adapter in adapters:
        named = {} if adapter is None else {"adapter": adapter}
        for number, prompt in enumerate(PROMPTS):
            body = {"prompt": prompt, "max_tokens": 12, "temperature": 0} | named
            ranking = {"query": prompt, "documents": ["아", " bad", "좋다 좋다"]} | named
            for kind, url, given in (
                ("text", "/v1/completions", body),
                ("rank", "/v1/rerank", ranking),
            ):
                id_ = f"{adapter}-{kind}-{number}"
                rows.append({"custom_id": id_, "method": "POST", "url": url, "body": given})
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_run_with_adapters_is_a_run_of_each_merged_model(tmp_path: Path) -> None:
    model = save_gpt2(tmp_path / "model")
    folders = {
        name: save_adapter(tmp_path / name, SIZES, seed=seed) for seed, name in enumerate("ab")
    }
    named = [part for n, path in folders.items() for part in ("--adapter", f"{n}={path}")]
    mixed = write(tmp_path / "mixed.jsonl", [None, "a", "b"])
    found = run(model, mixed, tmp_path / "mixed.out.jsonl", "--receipts", *named)
    assert len(found) == 18
    texts = {found[f"{name}-text-0"]["choices"][0]["text"] for name in (None, "a", "b")}
    assert len(texts) == 3
    assert found["a-text-0"]["receipt"]["adapter"]["name"] == "a@1"
    assert "adapter" not in found["None-text-0"]["receipt"]
    for name, folder in folders.items():
        whole = AutoModelForCausalLM.from_pretrained(model)
        merge(whole, folder)
        merged = tmp_path / f"merged-{name}"
        whole.save_pretrained(merged)
        save_tokenizer(merged, whole.config.vocab_size)
        lines = write(tmp_path / "plain.jsonl", [None])
        expected = run(merged, lines, tmp_path / f"{name}.out.jsonl", "--overwrite")
        for number in range(len(PROMPTS)):
            text, other = (
                rows[f"{key}-text-{number}"]["choices"][0]["text"]
                for rows, key in ((found, name), (expected, None))
            )
            assert text == other
            ranked, by_merged = (
                rows[f"{key}-rank-{number}"]["results"]
                for rows, key in ((found, name), (expected, None))
            )
            assert [one["index"] for one in ranked] == [one["index"] for one in by_merged]
            for one, two in zip(ranked, by_merged, strict=True):
                assert one["mean_nll"] == pytest.approx(two["mean_nll"], abs=1e-4)
