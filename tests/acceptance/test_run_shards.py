"""`nightjar run --shards 2` as a user meets it, and with a rank that is killed on the way."""

import os
import signal
from pathlib import Path

import pytest

from tests.processes import (
    completion_line,
    find_children,
    nightjar,
    nightjar_here,
    read_lines,
    rerank_line,
    start_nightjar,
    wait_until,
    write_lines,
)


def lines(count: int) -> list[dict[str, object]]:
    return [
        completion_line(f"row-{n}", prompt=f"안녕 {n}", max_tokens=40, ignore_eos=True)
        if n % 3
        else rerank_line(f"row-{n}", query=f"hello {n}", documents=[" a", " b c", " d"])
        for n in range(count)
    ]


def outcomes(out: Path) -> dict[str, object]:
    """Texts and orders of documents by row; scores differ in their last digits."""
    found = {}
    for line in read_lines(out):
        body = line["response"]["body"]
        found[line["custom_id"]] = (
            [choice["text"] for choice in body["choices"]]
            if "choices" in body
            else [result["index"] for result in body["results"]]
        )
    return found


@pytest.mark.slow
def test_a_killed_rank_costs_no_row_and_changes_none(tiny_model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", lines(90))
    whole, split = tmp_path / "whole.jsonl", tmp_path / "split.jsonl"
    common = ["run", source, "--model", tiny_model, "--dtype", "fp32", "--out"]
    done = nightjar(*common, whole)
    assert done.returncode == 0, done.stderr
    os.environ["NIGHTJAR_MICRO_BATCH_REQUESTS"] = "16"
    try:
        run = start_nightjar(*common, split, "--shards", "2", log=tmp_path / "log")
    finally:
        del os.environ["NIGHTJAR_MICRO_BATCH_REQUESTS"]
    wait_until("the second rank", lambda: find_children(run.pid, "gpu_worker.shards"))
    (follower,) = find_children(run.pid, "gpu_worker.shards")
    log = split.with_name(f"{split.name}.work") / "logs"
    wait_until("the model", lambda: any("model_loaded" in f.read_text() for f in log.iterdir()))
    follower.send_signal(signal.SIGKILL)
    assert run.wait(300) == 0, (tmp_path / "log").read_text()
    assert outcomes(split) == outcomes(whole)
    assert len(outcomes(split)) == 90


def test_shards_that_do_not_divide_end_the_run_with_the_reason(
    tiny_model: Path, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", lines(3))
    arguments = ["--model", tiny_model, "--out", tmp_path / "out.jsonl"]
    told = nightjar_here("run", source, *arguments, "--shards", "2", "--devices", "0,1,2")
    assert told.returncode == 2
    assert "3 devices for 2 shards" in told.stderr
    told = nightjar_here("run", source, *arguments, "--device", "cpu", "--devices", "0,1")
    assert told.returncode == 2
    assert "--device cpu --devices 0,1: give one of them" in told.stderr
    told = nightjar_here("run", source, *arguments, "--shards", "3")
    assert told.returncode == 2
    assert "possible are 1, 2, 4" in told.stderr
