"""Poison through the whole system: `nightjar run` with the shipped fake engine."""

from pathlib import Path

import pytest

from tests.processes import completion_line, nightjar, read_lines, write_lines

COUNT = 12


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTJAR_ENGINE", "fake")
    monkeypatch.setenv("NIGHTJAR_MICRO_BATCH_REQUESTS", "4")
    monkeypatch.setenv("NIGHTJAR_REQUEST_CRASHES", "2")


def run(folder: Path, model: Path, prompts: list[str], *options: str) -> tuple[int, str]:
    lines = [completion_line(f"row-{n}", prompt=prompt) for n, prompt in enumerate(prompts)]
    source = write_lines(folder / "in.jsonl", [*lines])
    out = folder / "out.jsonl"
    done = nightjar("run", source, "--model", model, "--out", out, *options)
    return done.returncode, done.stderr


def texts(out: Path) -> dict[str, str]:
    return {
        line["custom_id"]: line["response"]["body"]["choices"][0]["text"]
        for line in read_lines(out)
    }


@pytest.mark.slow
def test_a_poisoned_row_fails_alone_and_is_retried_when_asked(
    tmp_path: Path, tiny_model: Path
) -> None:
    undisturbed, poisoned = tmp_path / "undisturbed", tmp_path / "poisoned"
    prompts = [f"row number {n}" for n in range(COUNT)]
    for folder in (undisturbed, poisoned):
        folder.mkdir()
    assert run(undisturbed, tiny_model, prompts)[0] == 0
    expected = texts(undisturbed / "out.jsonl")

    prompts[6] = "<poison:crash>"
    status, said = run(poisoned, tiny_model, prompts)
    assert status == 3, said
    del expected["row-6"]
    assert texts(poisoned / "out.jsonl") == expected
    (failure,) = read_lines(poisoned / "out.errors.jsonl")
    told = failure["response"]["body"]["error"]
    assert (failure["custom_id"], told["code"]) == ("row-6", "compute_lost")
    assert (failure["response"]["status_code"], failure["error"]) == (500, None)
    assert told["message"] == (
        "computed alone 2 times and never answered; the last time the compute process was ended "
        "by SIGSEGV"
    )
    log = (poisoned / "out.jsonl.work" / "logs" / "gpu-worker.log").read_text()
    assert "action=micro_batch_crashed" in log
    assert "<poison" not in log

    status, said = run(poisoned, tiny_model, prompts)
    assert status == 3
    assert "already finished" in said
    status, said = run(poisoned, tiny_model, prompts, "--retry")
    assert status == 3
    assert "1 requests in" in said
    assert texts(poisoned / "out.jsonl") == expected
    assert len(read_lines(poisoned / "out.errors.jsonl")) == 1
