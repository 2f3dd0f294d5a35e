"""Batches by the official `openai` client against a real system of processes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.batches import completions, lines_of
from tests.faults.system import System
from tests.openai_client import openai_system, read_file, wait_over
from tests.processes import completion_line, rerank_line, wait_until


@pytest.fixture(scope="module")
def place(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[System, openai.OpenAI]]:
    folder = tmp_path_factory.mktemp("system")
    with openai_system(folder, f"sqlite:///{folder / 'nightjar.db'}", tiny_model) as running:
        yield running


@pytest.fixture
def client(place: tuple[System, openai.OpenAI]) -> openai.OpenAI:
    return place[1]


def upload(client: openai.OpenAI, lines: list[Any]) -> str:
    return client.files.create(file=("in.jsonl", lines_of(lines)), purpose="batch").id


def create(client: openai.OpenAI, lines: list[Any], **fields: Any) -> openai.types.Batch:
    return client.batches.create(
        input_file_id=upload(client, lines),
        endpoint="/v1/completions",
        completion_window="24h",
        **fields,
    )


def test_from_a_file_to_its_results(client: openai.OpenAI) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    lines = [
        *completions(20),
        rerank_line("rank", query="hello", documents=[" blue", " sky"]),
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        completion_line("no prompt"),
        "no JSON",
    ]
    made = create(client, lines, metadata={"night": "밤"})
    assert (made.object, made.status, made.endpoint) == ("batch", "validating", "/v1/completions")
    ended = wait_over(client, made.id)
    assert ended.status == "completed"
    assert ended.model_dump(include={"id", "input_file_id", "metadata", "completion_window"}) == {
        "id": made.id,
        "input_file_id": made.input_file_id,
        "metadata": {"night": "밤"},
        "completion_window": "24h",
    }
    assert ended.request_counts is not None
    output, errors = read_file(client, ended.output_file_id), read_file(client, ended.error_file_id)
    counts = ended.request_counts
    assert (counts.total, counts.completed, counts.failed) == (24, len(output), len(errors))
    good = {line["custom_id"]: line for line in output}
    assert good.keys() >= {f"row-{n}" for n in range(20)} | {"rank"}
    for line in output:
        assert (line["response"]["status_code"], line["error"]) == (200, None)
    assert good["row-0"]["response"]["body"]["object"] == "text_completion"
    told = {line["custom_id"]: line["response"]["body"]["error"] for line in errors}
    assert told["no prompt"]["code"] == "missing_field"
    assert (told[None]["code"], told[None]["line"]) == ("invalid_json", 24)
    assert all(line["error"] is None for line in errors)
    assert ended.usage is not None
    assert ended.usage.total_tokens == ended.usage.input_tokens + ended.usage.output_tokens > 0
    moments = (ended.created_at, ended.in_progress_at, ended.finalizing_at, ended.completed_at)
    assert list(moments) == sorted(moment for moment in moments if moment is not None)
    listed = {file.id for file in client.files.list(purpose="batch_output")}
    assert {ended.output_file_id, ended.error_file_id} <= listed


def test_a_cancelled_batch_keeps_what_finished(client: openai.OpenAI) -> None:
    long = [
        completion_line(f"row-{n}", prompt=f"p {n}", max_tokens=60, ignore_eos=True)
        for n in range(600)
    ]
    made = create(client, long)

    def some_completed() -> bool:
        counts = client.batches.retrieve(made.id).request_counts
        return counts is not None and counts.completed > 0

    wait_until("first rows", some_completed, 60)
    assert client.batches.cancel(made.id).status == "cancelling"
    ended = wait_over(client, made.id)
    assert (ended.status, ended.cancelled_at is None) == ("cancelled", False)
    output, rest = read_file(client, ended.output_file_id), read_file(client, ended.error_file_id)
    assert len(output) + len(rest) == 600
    assert {line["error"]["code"] for line in rest} == {"batch_cancelled"}
    assert {line["response"] for line in rest} == {None}
    names = [line["custom_id"] for line in output + rest]
    assert len(set(names)) == len(names)


def test_a_deadline(client: openai.OpenAI) -> None:
    made = client.batches.create(
        input_file_id=upload(client, completions(2_000)),
        endpoint="/v1/completions",
        completion_window="1s",  # type: ignore[arg-type]  # OpenAI's has one span alone
    )
    ended = wait_over(client, made.id)
    assert (ended.status, ended.expired_at is None) == ("expired", False)
    rest = read_file(client, ended.error_file_id)
    assert {line["error"]["code"] for line in rest} == {"batch_expired"}
    assert ended.request_counts is not None
    assert ended.request_counts.completed + len(rest) == 2_000


def test_strict_mode_fails_with_the_lines(client: openai.OpenAI) -> None:
    lines = [*completions(1), rerank_line("r", query="q", documents=["d"])]
    made = create(client, lines, extra_body={"strict": True})
    ended = wait_over(client, made.id)
    assert ended.status == "failed"
    assert ended.errors is not None
    assert ended.errors.data is not None
    (error,) = ended.errors.data
    assert (error.code, error.line, error.param) == ("url_mismatch", 2, "url")
    assert (ended.output_file_id, ended.error_file_id) == (None, None)


def test_its_pager_lists_every_batch_once(client: openai.OpenAI) -> None:
    file_id = upload(client, completions(1))
    made = [
        client.batches.create(
            input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
        ).id
        for _ in range(5)
    ]
    listed = [batch.id for batch in client.batches.list(limit=2)]
    assert len(listed) == len(set(listed))
    assert set(listed[:5]) == set(made)


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.batches.retrieve("batch_unknown")
    assert unknown.value.code == "unknown_batch"
    with pytest.raises(openai.NotFoundError) as no_file:
        client.batches.create(
            input_file_id="file-none", endpoint="/v1/completions", completion_window="24h"
        )
    assert (no_file.value.code, no_file.value.param) == ("unknown_file", "input_file_id")
    with pytest.raises(openai.BadRequestError) as endpoint:
        client.batches.create(
            input_file_id=upload(client, completions(1)),
            endpoint="/v1/embeddings",
            completion_window="24h",
        )
    assert endpoint.value.param == "endpoint"
    over = wait_over(client, create(client, ["no JSON"]).id)
    with pytest.raises(openai.ConflictError) as late:
        client.batches.cancel(over.id)
    assert late.value.code == "wrong_state"


def test_the_guide_does_what_it_says(
    client: openai.OpenAI,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "batches.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", guide, re.DOTALL))
    assert "http://127.0.0.1:8000/v1" in code
    code = code.replace("http://127.0.0.1:8000/v1", str(client.base_url)).replace("(5)", "(0.1)")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "batches.md", "exec"), names)  # noqa: S102 - our own guide
    names["client"].close()
    said = capsys.readouterr().out
    assert "validating" in said
    assert "talk-0" in said
    assert "talk-1" in said
