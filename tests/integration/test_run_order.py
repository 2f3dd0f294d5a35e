"""What `nightjar run` does side by side, so that no user waits for one after the other."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from nightjar.jobs.records import Job, NewRequest, RejectedRow
from nightjar.jobs.store import Store
from nightjar.pipeline.embedded.line_files import LineFiles
from nightjar.pipeline.embedded.run import RunArguments, run
from nightjar.pipeline.embedded.summary import Listener
from nightjar.pipeline.embedded.work import RunError
from tests.processes import completion_line, read_lines, wait_until, write_lines


class Watched(LineFiles):
    """Waits for the services before the rows are read, and for their end before it writes."""

    def rows(self, most_bad_in_a_row: int) -> Iterator[NewRequest | RejectedRow]:
        for name in ("planner", "gpu-worker"):
            wait_until(f"the {name}", lambda name=name: b"ready" in self.log(name))
        yield from super().rows(most_bad_in_a_row)

    def write(self, store: Store, job: Job, workdir: Path, *, overwrite: bool) -> set[str]:
        for name in ("planner", "gpu-worker"):
            wait_until(f"the end of the {name}", lambda name=name: b"shutdown" in self.log(name))
        return super().write(store, job, workdir, overwrite=overwrite)

    def log(self, name: str) -> bytes:
        log = self.workdir / "logs" / f"{name}.log"
        return log.read_bytes() if log.exists() else b""


def test_services_start_while_rows_are_read_and_end_while_answers_are_written(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTJAR_ENGINE", "fake")
    lines = [completion_line(f"row {n}", prompt="hi") for n in range(5)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    work = Watched(source, tmp_path / "out.jsonl")
    summary = run(RunArguments(work, tiny_model), Listener())
    assert (summary.job.completed, summary.job.total) == (5, 5)
    assert len(read_lines(tmp_path / "out.jsonl")) == 5


class Endless(LineFiles):
    """The same row again and again, at a pace that leaves the services a processor to start on."""

    def rows(self, most_bad_in_a_row: int) -> Iterator[NewRequest | RejectedRow]:
        (row,) = super().rows(most_bad_in_a_row)
        assert isinstance(row, NewRequest)
        for index in itertools.count():
            time.sleep(0.005)
            yield replace(row, index=index, line=index, custom_id=str(index))


def test_a_model_that_cannot_be_loaded_ends_a_run_before_all_rows_are_read(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTJAR_KV_CACHE_BYTES", "1")
    source = write_lines(tmp_path / "in.jsonl", [completion_line("row", prompt="hi")])
    with pytest.raises(RunError, match=r"the gpu-worker cannot start: .*kv_cache_bytes"):
        run(RunArguments(Endless(source, tmp_path / "out.jsonl"), tiny_model), Listener())
