"""Runs of tasks in a deployment: read once, written once, whatever happens in between."""

import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from nightjar.jobs.records import ClaimedMicroBatch, EncodedRequest, NewMicroBatch, NewResult
from nightjar.jobs.schedule_records import ChangeAction, RunState, Schedule, ScheduleRun
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.pipeline.runner.process import MOST_ATTEMPTS, TaskRunner
from nightjar.pipeline.settings import Settings
from tests.outcomes import answers as made_up
from tests.outcomes import claim
from tests.schedules import DAY, FIRST, Clock, add_schedule, planner, runs_of
from tests.tasks import PROMPT, write_rows, write_task

SINK = '[parameters]\nmax_tokens = 4\n[sink]\nparquet = "answers.parquet"'


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def runner(store: Store, clock: Clock, tiny_model: Path) -> TaskRunner:
    return runner_of(store, clock, tiny_model)


def runner_of(store: Store, clock: Clock, model: Path, **settings: Any) -> TaskRunner:
    read = Settings.read(model=model, model_name="tiny", **settings)
    return TaskRunner(store, read, os.environ, clock=clock.now, first_pause_s=1.0)


def task_in(folder: Path, rows: int = 3, more: str = SINK) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder, {"id": list(range(rows)), "review": [f"r{n}" for n in range(rows)]})
    return write_task(folder, PROMPT, more=more)


def night(store: Store, clock: Clock, number: int = 0) -> None:
    clock.moment = FIRST + number * DAY
    planner(store, clock).step()


def step(runner: TaskRunner) -> bool:
    taken = runner.take()
    runner.wait()
    return taken


def answers(claimed: ClaimedMicroBatch) -> list[NewResult]:
    """A success for each request, in the shape of a worker's."""
    return [
        msgspec.structs.replace(
            one,
            body={
                "choices": [{"index": 0, "text": one.body["text"], "finish_reason": "stop"}],
                "model": "tiny",
            },
        )
        for one in made_up(claimed)
        if one.body is not None
    ]


def compute(store: Store, job_id: str, make: Callable[..., list[NewResult]] = answers) -> None:
    """Answer every request of a job."""
    queued = [request.id for request in store.backlog.queued_requests(job_id, 1_000)]
    refs = store.planning.save_plan(
        job_id,
        [EncodedRequest(id_, [[1, 2, 3]]) for id_ in queued],
        [NewMicroBatch(RequestKind.GENERATE, 32, queued, 9)],
        [],
    )
    for ref in refs:
        claimed = claim(store, ref)
        assert store.leases.finish(claimed.id, claimed.epoch, "worker", make(claimed))


def newest(store: Store, schedule: Schedule) -> ScheduleRun:
    return runs_of(store, schedule)[-1]


def table(folder: Path) -> dict[int, str]:
    rows = pq.read_table(folder / "answers.parquet").to_pylist()
    return {row["id"]: row["text"] for row in rows}


def test_a_night_from_a_table_to_a_table(
    store: Store, clock: Clock, runner: TaskRunner, tmp_path: Path
) -> None:
    task = task_in(tmp_path)
    schedule = add_schedule(store, clock, task_path=str(task), priority=3, keep_results_s=7_200)
    assert not step(runner)
    night(store, clock)
    assert step(runner)
    run = newest(store, schedule)
    assert (run.state, run.job_id is not None) == (RunState.COMPUTING, True)
    job = store.jobs.get(run.job_id or "")
    assert (job.model, job.total, job.priority, job.keep_results_s) == ("tiny", 3, 3, 7_200)
    assert job.metadata == {"schedule": "nightly", "run": run.id}
    assert not step(runner)  # it is not over
    compute(store, job.id)
    assert step(runner)
    run = newest(store, schedule)
    assert (run.state, run.reason) == (RunState.SUCCEEDED, None)
    assert (run.total, run.completed, run.failed) == (3, 3, 0)
    assert table(tmp_path) == {n: f"answer to [{n}]" for n in range(3)}
    assert not step(runner)


def test_a_runner_that_died_while_it_read_or_wrote_leaves_one_job(
    store: Store, clock: Clock, runner: TaskRunner, tmp_path: Path, tiny_model: Path
) -> None:
    """Each time its claim stands still; the next process takes the run again."""
    schedule = add_schedule(store, clock, task_path=str(task_in(tmp_path)))
    night(store, clock)
    dead = "elsewhere:1:ab:ffff:1"  # of another machine: only its counter tells
    assert store.schedule_work.claim(dead, clock.now()) is not None
    other = runner_of(store, clock, tiny_model, worker_dead_after_s=0.01, heartbeat_s=9)
    assert not step(other)
    other.watched.seconds += 1.0
    assert step(other)
    run = newest(store, schedule)
    assert run.state is RunState.COMPUTING
    compute(store, run.job_id or "")
    assert store.schedule_work.claim(dead, clock.now()) is not None
    step(other)
    other.watched.seconds += 1.0
    assert step(other)
    assert newest(store, schedule).state is RunState.SUCCEEDED
    assert len(store.jobs.newest(9)) == 1
    assert len(table(tmp_path)) == 3


def test_a_process_that_lost_its_run_lands_nothing(
    store: Store, clock: Clock, runner: TaskRunner, tmp_path: Path
) -> None:
    """It was stopped while it read, its run was taken by another, and it goes on."""
    schedule = add_schedule(store, clock, task_path=str(task_in(tmp_path)))
    night(store, clock)
    claimed = store.schedule_work.claim("slow", clock.now())
    assert claimed is not None
    (held,) = store.schedule_work.held()
    assert store.schedule_work.take_back(held)
    assert not store.schedule_work.take_back(held)
    runner.attempt(claimed)
    assert store.jobs.newest(9) == []
    assert newest(store, schedule).state is RunState.READING
    assert step(runner)
    assert len(store.jobs.newest(9)) == 1


def test_a_task_file_that_vanished_fails_the_run_and_the_next_night_is_tried(
    store: Store, clock: Clock, runner: TaskRunner, tmp_path: Path
) -> None:
    task = task_in(tmp_path)
    schedule = add_schedule(store, clock, task_path=str(task))
    text = task.read_text()
    task.unlink()
    night(store, clock)
    assert step(runner)
    run = newest(store, schedule)
    assert run.state is RunState.FAILED
    assert run.reason == f"the task file {task}: No such file or directory"
    task.write_text(text)
    night(store, clock, 1)
    assert step(runner)
    assert newest(store, schedule).state is RunState.COMPUTING


def test_a_task_file_that_changed_since_is_recorded_and_a_run_keeps_what_it_began_with(
    store: Store, clock: Clock, runner: TaskRunner, tmp_path: Path
) -> None:
    task = task_in(tmp_path)
    schedule = add_schedule(store, clock, task_path=str(task), deadline_s=10**6)
    night(store, clock)
    step(runner)
    first = task.read_text()
    task.write_text(first.replace("answers.parquet", "other.parquet"))
    compute(store, newest(store, schedule).job_id or "")
    step(runner)
    assert newest(store, schedule).state is RunState.SUCCEEDED
    assert len(table(tmp_path)) == 3
    assert not (tmp_path / "other.parquet").exists()
    assert len(store.schedules.changes("default", 9)) == 1
    night(store, clock, 1)
    step(runner)
    changed = store.schedules.changes("default", 9)[0]
    assert (changed.action, changed.actor) == (ChangeAction.TASK_CHANGED, "the task file")
    assert changed.before.keys() == changed.after.keys() == {"task_digest"}
    compute(store, newest(store, schedule).job_id or "")
    step(runner)
    assert (tmp_path / "other.parquet").exists()


def test_a_source_that_is_away_is_tried_again_and_then_given_up(
    store: Store, clock: Clock, runner: TaskRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP", "postgresql://nobody:hunter2@127.0.0.1:1/shop")
    task_in(tmp_path)
    write_task(tmp_path, PROMPT, source='sql = {url = "env:SHOP", query = "SELECT 1 AS id"}')
    schedule = add_schedule(store, clock, task_path=str(tmp_path / "task.toml"))
    night(store, clock)
    for attempt in range(1, MOST_ATTEMPTS + 1):
        assert step(runner)
        run = newest(store, schedule)
        if run.state is RunState.FAILED:
            break
        assert (run.state, run.attempts) == (RunState.READING, attempt)
        assert not step(runner)  # not before its time
        clock.moment += timedelta(minutes=20)
    assert run.state is RunState.FAILED
    assert "hunter2" not in (run.reason or "")
    assert "cannot be reached" in (run.reason or "")


def test_answers_that_cannot_be_written_are_tried_again(
    store: Store, clock: Clock, runner: TaskRunner, tmp_path: Path
) -> None:
    task_in(tmp_path)
    more = SINK.replace(
        'parquet = "answers.parquet"', 'sql = {url = "sqlite:///out.db", table = "t"}'
    )
    task = write_task(tmp_path, PROMPT, more=more)
    schedule = add_schedule(store, clock, task_path=str(task))
    night(store, clock)
    step(runner)
    compute(store, newest(store, schedule).job_id or "")
    with closing(sqlite3.connect(tmp_path / "out.db")) as other:
        other.execute("CREATE TABLE t (strange)")
        other.commit()
    step(runner)
    run = newest(store, schedule)
    assert run.state in (RunState.FAILED, RunState.WRITING)
    assert "job" in (run.reason or "") or run.state is RunState.WRITING
    with closing(sqlite3.connect(tmp_path / "out.db")) as other:
        assert other.execute("SELECT count(*) FROM t").fetchall() == [(0,)]


def test_when_no_row_succeeds_the_table_stays_as_it_was(
    store: Store, clock: Clock, runner: TaskRunner, tmp_path: Path
) -> None:
    schedule = add_schedule(store, clock, task_path=str(task_in(tmp_path)))

    def fail(claimed: Any) -> list[NewResult]:
        return [NewResult.failure(one.id, "broken", "no good") for one in claimed.requests]

    for number, make in enumerate((answers, fail)):
        night(store, clock, number)
        step(runner)
        compute(store, newest(store, schedule).job_id or "", make)
        step(runner)
    run = newest(store, schedule)
    assert run.state is RunState.FAILED
    assert (run.reason or "").startswith("no row succeeded; the sink is as it was, and job ")
    assert (run.reason or "").endswith("the first: broken: no good")
    assert table(tmp_path) == {n: f"answer to [{n}]" for n in range(3)}


def test_a_job_that_was_cancelled_writes_nothing(
    store: Store, clock: Clock, runner: TaskRunner, tmp_path: Path
) -> None:
    schedule = add_schedule(store, clock, task_path=str(task_in(tmp_path)))
    night(store, clock)
    step(runner)
    store.stopping.cancel(newest(store, schedule).job_id or "")
    step(runner)
    assert newest(store, schedule).state is RunState.CANCELLED
    assert not (tmp_path / "answers.parquet").exists()


@pytest.mark.parametrize(
    ("tenant", "name", "told"),
    [
        ("owls", "task.toml", None),
        ("bats", "task.toml", "No such file or directory"),
        ("owls", "../owls/task.toml", "name a file of the task folder"),
        ("owls", "deeper/../../default/secret.toml", "name a file of the task folder"),
        ("owls", "/etc/passwd", "name a file of the task folder"),
        ("owls", "link.toml", "leads out of the task folder"),
    ],
)
@pytest.mark.sampled
def test_a_task_of_the_api_is_one_of_the_tenants_folder(
    store: Store, clock: Clock, tmp_path: Path, tiny_model: Path, tenant: str, name: str, told: str
) -> None:
    task_in(tmp_path / "tasks" / "owls")
    secret = task_in(tmp_path / "elsewhere")
    (tmp_path / "tasks" / "owls" / "link.toml").symlink_to(secret)
    schedule = add_schedule(store, clock, tenant=tenant, task_path=None, task_name=name)
    night(store, clock)
    step(runner_of(store, clock, tiny_model, task_folder=tmp_path / "tasks"))
    run = newest(store, schedule)
    assert run.state is (RunState.COMPUTING if told is None else RunState.FAILED)
    assert (told or "") in (run.reason or "")


def test_a_runner_without_a_task_folder_says_so(
    store: Store, clock: Clock, runner: TaskRunner
) -> None:
    schedule = add_schedule(store, clock, task_path=None, task_name="task.toml")
    night(store, clock)
    step(runner)
    assert "NIGHTJAR_TASK_FOLDER, which is not set" in (newest(store, schedule).reason or "")


@pytest.mark.parametrize("model", ["elsewhere", None])
def test_a_model_that_is_not_served_fails_the_run(
    store: Store, clock: Clock, tmp_path: Path, tiny_model: Path, model: str | None
) -> None:
    task = task_in(tmp_path)
    if model is not None:
        task.write_text(f'model = "{model}"\n{task.read_text()}')
    schedule = add_schedule(store, clock, task_path=str(task))
    night(store, clock)
    read = Settings.read(models=f"one={tiny_model},two={tmp_path}")
    step(TaskRunner(store, read, os.environ, clock=clock.now))
    named = "names no model" if model is None else "names the model 'elsewhere'"
    reason = newest(store, schedule).reason or ""
    assert f"{named}; this deployment serves one, two: name one of them" in reason


def test_a_process_that_is_told_to_end_gives_its_step_back(
    store: Store, clock: Clock, runner: TaskRunner, tmp_path: Path, tiny_model: Path
) -> None:
    schedule = add_schedule(store, clock, task_path=str(task_in(tmp_path, rows=2_000)))
    night(store, clock)
    runner.stop()
    step(runner)
    run = newest(store, schedule)
    assert (run.state, run.attempts, run.reason) == (RunState.READING, 0, None)
    thread = threading.Thread(target=(again := runner_of(store, clock, tiny_model)).run)
    thread.start()
    for _ in range(200):
        if newest(store, schedule).state is RunState.COMPUTING:
            break
        thread.join(0.1)
    again.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert newest(store, schedule).state is RunState.COMPUTING
    assert store.jobs.get(newest(store, schedule).job_id or "").total == 2_000


def test_rows_that_cannot_be_requests_are_failures_of_the_job(
    store: Store, clock: Clock, runner: TaskRunner, tmp_path: Path
) -> None:
    task = task_in(tmp_path)
    write_rows(tmp_path, {"id": [1, 2], "review": ["a", None]})
    schedule = add_schedule(store, clock, task_path=str(task))
    night(store, clock)
    step(runner)
    compute(store, newest(store, schedule).job_id or "")
    step(runner)
    run = newest(store, schedule)
    assert (run.state, run.completed, run.failed) == (RunState.SUCCEEDED, 1, 1)
    rows = pq.read_table(tmp_path / "answers.parquet").to_pylist()
    assert {row["id"]: row["error_code"] for row in rows} == {1: None, 2: "invalid_row"}
