"""Schedules with a clock that the test moves: each planned time runs once, whatever happens."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from nightjar.jobs.errors import (
    DuplicateScheduleError,
    LifecycleError,
    TooManySchedulesError,
    UnknownScheduleError,
)
from nightjar.jobs.events import EventType
from nightjar.jobs.file_records import NewFile
from nightjar.jobs.schedule_records import (
    ChangeAction,
    Definition,
    NewSchedule,
    RunEnd,
    RunState,
    Schedule,
    Trigger,
    WhenRunning,
)
from nightjar.jobs.states import BatchStatus
from nightjar.jobs.store import Store
from nightjar.jobs.store.schedules import MOST_OF_TENANT
from nightjar.pipeline.queue.scheduling import jitter_s
from tests.schedules import DAY, FIRST, MINUTE, Clock, add_schedule, planner, runs_of, states
from tests.webhooks import add as add_webhook
from tests.webhooks import of as deliveries_of
from tests.webhooks import take

ROW = (
    b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", '
    b'"body": {"prompt": "p", "max_tokens": 4}}'
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def end(store: Store, clock: Clock, state: RunState = RunState.SUCCEEDED) -> None:
    """End the run that is next, as the process that runs tasks would."""
    claimed = store.schedule_work.claim("runner", clock.now())
    assert claimed is not None
    reason = None if state is RunState.SUCCEEDED else "the test says so"
    assert store.schedule_work.finish(claimed, RunEnd(state, reason, 3, 1, 2), clock.now())


def test_a_planned_time_runs_once_and_not_before_it_comes(store: Store, clock: Clock) -> None:
    schedule, pass_ = add_schedule(store, clock), planner(store, clock)
    pass_.step()
    clock.moment = FIRST - MINUTE
    pass_.step()
    assert runs_of(store, schedule) == []
    clock.moment = FIRST
    for _ in range(3):
        pass_.step()
    (run,) = runs_of(store, schedule)
    assert (run.planned_at, run.trigger, run.state) == (FIRST, Trigger.PLANNED, RunState.WAITING)
    assert run.deadline_at == FIRST + DAY
    assert store.schedules.get("default", schedule.id).next_at == FIRST + DAY


def test_many_planners_at_once_make_one_run_a_night(store: Store, clock: Clock) -> None:
    """Two beats that tick at once are two planners that look at once."""
    schedule = add_schedule(store, clock, when_still_running=WhenRunning.QUEUE)
    with ThreadPoolExecutor(4) as threads:
        for night in range(3):
            clock.moment = FIRST + night * DAY
            passes = [planner(store, clock) for _ in range(4)]
            assert [one.result() for one in [threads.submit(p.step) for p in passes]] == [1.0] * 4
            end(store, clock)
    assert [run.planned_at for run in runs_of(store, schedule)] == [
        FIRST,
        FIRST + DAY,
        FIRST + 2 * DAY,
    ]


def test_a_planner_that_saw_the_time_come_but_wrote_late_adds_nothing(
    store: Store, clock: Clock
) -> None:
    """It was stopped between its look and its transaction; another one was quicker."""
    schedule = add_schedule(store, clock)
    clock.moment = FIRST
    (seen,) = store.schedule_runs.due(clock.now(), 9)
    planner(store, clock).step()
    slow = planner(store, clock)
    slow.fire(seen, clock.now() + MINUTE)
    assert len(runs_of(store, schedule)) == 1


@pytest.mark.parametrize("back", [timedelta(minutes=5), timedelta(hours=3), timedelta(days=2)])
def test_a_clock_that_is_set_back_repeats_nothing(
    store: Store, clock: Clock, back: timedelta
) -> None:
    schedule, pass_ = add_schedule(store, clock), planner(store, clock)
    for night in range(3):
        clock.moment = FIRST + night * DAY
        pass_.step()
        end(store, clock)
    clock.moment -= back
    while clock.moment < FIRST + 3 * DAY + timedelta(hours=1):
        pass_.step()
        clock.moment += timedelta(minutes=30)
    assert [run.planned_at for run in runs_of(store, schedule)] == [
        FIRST + n * DAY for n in range(4)
    ]


def test_a_clock_that_was_far_ahead_for_a_while_costs_no_later_night(
    store: Store, clock: Clock
) -> None:
    schedule, pass_ = add_schedule(store, clock), planner(store, clock)
    clock.moment = FIRST + 300 * DAY
    pass_.step()
    end(store, clock)
    clock.moment = FIRST - timedelta(hours=1)
    pass_.step()
    for night in range(2):
        clock.moment = FIRST + night * DAY
        pass_.step()
        end(store, clock)
    assert [run.planned_at for run in runs_of(store, schedule)] == [
        FIRST + 300 * DAY,
        FIRST,
        FIRST + DAY,
    ]


def test_nights_that_ran_before_a_clock_was_set_back_are_not_missed(
    store: Store, clock: Clock
) -> None:
    schedule, pass_ = add_schedule(store, clock), planner(store, clock)
    for night in (0, 1):
        clock.moment = FIRST + night * DAY
        pass_.step()
        end(store, clock)
    clock.moment = FIRST - timedelta(hours=1)
    pass_.step()  # the first night is the next one again
    clock.moment = FIRST + 3 * DAY
    pass_.step()
    assert [run.missed for run in runs_of(store, schedule)] == [0, 0, 1]


def test_missed_nights_are_caught_up_once(store: Store, clock: Clock) -> None:
    schedule = add_schedule(store, clock)
    clock.moment = FIRST + 2 * DAY + timedelta(hours=5)
    planner(store, clock).step()
    planner(store, clock).step()
    (run,) = runs_of(store, schedule)
    assert (run.planned_at, run.trigger, run.missed) == (FIRST + 2 * DAY, Trigger.CATCH_UP, 2)
    assert run.deadline_at == clock.moment + DAY  # it has as much time as any other
    assert store.schedules.get("default", schedule.id).next_at == FIRST + 3 * DAY


def test_a_schedule_that_catches_nothing_up_says_what_was_missed(
    store: Store, clock: Clock
) -> None:
    schedule = add_schedule(store, clock, catch_up=False)
    clock.moment = FIRST + timedelta(minutes=4)  # beat was away for some minutes: not missed
    planner(store, clock).step()
    end(store, clock)
    clock.moment = FIRST + DAY + timedelta(minutes=6)
    planner(store, clock).step()
    first, second = runs_of(store, schedule)
    assert first.state is RunState.SUCCEEDED
    assert (second.state, second.reason) == (
        RunState.SKIPPED,
        "it was missed: no planner was there at its time",
    )


def test_a_run_is_skipped_while_an_earlier_one_goes_on(store: Store, clock: Clock) -> None:
    schedule, pass_ = add_schedule(store, clock, deadline_s=10 * 86_400), planner(store, clock)
    for night in range(2):
        clock.moment = FIRST + night * DAY
        pass_.step()
    first, second = runs_of(store, schedule)
    assert (first.state, second.state) == (RunState.WAITING, RunState.SKIPPED)
    assert second.reason == "the run planned at 2026-11-24T02:00:00+00:00 goes on (waiting)"
    end(store, clock)
    assert store.schedule_work.claim("runner", clock.now()) is None  # what was skipped stays so


def test_one_run_waits_for_an_earlier_one_and_no_more(store: Store, clock: Clock) -> None:
    schedule = add_schedule(
        store, clock, when_still_running=WhenRunning.QUEUE, deadline_s=10 * 86_400
    )
    pass_ = planner(store, clock)
    for night in range(3):
        clock.moment = FIRST + night * DAY
        pass_.step()
    assert states(store, schedule) == [RunState.WAITING, RunState.WAITING, RunState.SKIPPED]
    first = store.schedule_work.claim("runner", clock.now())
    assert first is not None
    assert first.run.planned_at == FIRST
    assert store.schedule_work.claim("other", clock.now()) is None  # one after the other
    store.schedule_work.finish(first, RunEnd(RunState.SUCCEEDED), clock.now())
    end(store, clock)
    assert states(store, schedule)[1] is RunState.SUCCEEDED


def test_a_later_run_may_cancel_an_earlier_one(store: Store, clock: Clock) -> None:
    schedule = add_schedule(
        store, clock, when_still_running=WhenRunning.CANCEL, deadline_s=10 * 86_400
    )
    pass_ = planner(store, clock)
    clock.moment = FIRST
    pass_.step()
    reading = store.schedule_work.claim("runner", clock.now())
    assert reading is not None
    clock.moment = FIRST + DAY
    pass_.step()
    assert states(store, schedule) == [RunState.CANCELLED, RunState.WAITING]
    assert not store.schedule_work.finish(reading, RunEnd(RunState.SUCCEEDED), clock.now())
    end(store, clock)
    assert states(store, schedule) == [RunState.CANCELLED, RunState.SUCCEEDED]


def test_a_run_that_nobody_takes_fails_at_its_deadline(store: Store, clock: Clock) -> None:
    schedule, pass_ = add_schedule(store, clock, deadline_s=3_600), planner(store, clock)
    clock.moment = FIRST
    pass_.step()
    clock.moment = FIRST + timedelta(hours=1)
    pass_.step()
    (run,) = runs_of(store, schedule)
    assert run.state is RunState.FAILED
    assert run.reason is not None
    assert run.reason.startswith("its deadline has passed while it was waiting; no process")


def test_jitter_is_bounded_and_the_same_whoever_computes_it(store: Store, clock: Clock) -> None:
    schedule = add_schedule(store, clock, jitter_s=600)
    drawn = [jitter_s(schedule, FIRST + night * DAY) for night in range(50)]
    assert drawn == [jitter_s(schedule, FIRST + night * DAY) for night in range(50)]
    assert 0 <= min(drawn) < 100
    assert 500 < max(drawn) <= 600
    clock.moment = FIRST
    planner(store, clock).step()
    (run,) = runs_of(store, schedule)
    assert run.begin_at == FIRST + timedelta(seconds=drawn[0])
    assert store.schedule_work.claim("runner", run.begin_at - timedelta(seconds=1)) is None
    assert store.schedule_work.claim("runner", run.begin_at) is not None


def test_three_failures_in_a_row_are_announced_once(store: Store, clock: Clock) -> None:
    schedule, pass_ = add_schedule(store, clock), planner(store, clock)
    webhook = add_webhook(store, EventType.SCHEDULE_FAILING)
    other = add_webhook(store, EventType.SCHEDULE_FAILING, tenant="bats")
    ends = [RunState.FAILED, RunState.SUCCEEDED, *[RunState.FAILED] * 4]
    announced = []
    for night, state in enumerate(ends):
        clock.moment = FIRST + night * DAY
        pass_.step()
        end(store, clock, state)
        announced.append(len(deliveries_of(store, webhook)))
    assert announced == [0, 0, 0, 0, 1, 1]
    assert deliveries_of(store, other) == []
    assert store.schedules.get("default", schedule.id).failures == 4
    (due,) = take(store)
    body = json.loads(due.body)
    assert (body["type"], body["data"]) == (
        "schedule.failing",
        {
            "id": schedule.id,
            "counts": {"total": 3, "completed": 1, "failed": 2, "cancelled": 0},
        },
    )


def test_a_paused_schedule_sleeps_and_what_passed_meanwhile_does_not_count(
    store: Store, clock: Clock
) -> None:
    schedule, pass_ = add_schedule(store, clock), planner(store, clock)
    store.schedules.set_paused("default", schedule.id, "alice", None, paused=True)
    clock.moment = FIRST + 2 * DAY + timedelta(hours=5)
    pass_.step()
    assert runs_of(store, schedule) == []
    resumed = store.schedules.set_paused(
        "default", schedule.id, "alice", FIRST + 3 * DAY, paused=False
    )
    assert resumed.next_at == FIRST + 3 * DAY
    pass_.step()
    assert runs_of(store, schedule) == []
    clock.moment = FIRST + 3 * DAY
    pass_.step()
    assert [run.missed for run in runs_of(store, schedule)] == [0]


def test_run_now_is_a_run_of_its_own(store: Store, clock: Clock) -> None:
    schedule = add_schedule(store, clock, jitter_s=600)
    made = store.schedule_runs.run_now("default", schedule.id, "alice", clock.now())
    assert (made.trigger, made.begin_at, made.state) == (
        Trigger.MANUAL,
        clock.now(),
        RunState.WAITING,
    )
    with pytest.raises(LifecycleError, match="cannot run now: the run planned at"):
        store.schedule_runs.run_now("default", schedule.id, "alice", clock.now() + MINUTE)
    end(store, clock)
    clock.moment = FIRST
    planner(store, clock).step()
    assert [run.planned_at for run in runs_of(store, schedule)][1] == FIRST
    with pytest.raises(UnknownScheduleError):
        store.schedule_runs.run_now("bats", schedule.id, "alice", clock.now())


def test_every_change_says_who_when_and_what(store: Store, clock: Clock) -> None:
    schedule = add_schedule(store, clock)
    definition = Definition(cron="0 3 * * *", task_path="/tasks/rank.toml", jitter_s=60)
    changed = store.schedules.update(schedule, definition, "alice", FIRST, source="/a.toml")
    assert (changed.definition, changed.next_at, changed.source) == (definition, FIRST, "/a.toml")
    store.schedules.update(changed, definition, "bob", FIRST)  # nothing differs
    store.schedules.set_paused("default", schedule.id, "bob", None, paused=True)
    store.schedules.set_paused("default", schedule.id, "bob", None, paused=True)
    store.schedules.delete("default", schedule.id, "carol")
    found = store.schedules.changes("default", 100)[::-1]
    assert [(one.action, one.actor) for one in found] == [
        (ChangeAction.CREATED, "test"),
        (ChangeAction.UPDATED, "alice"),
        (ChangeAction.PAUSED, "bob"),
        (ChangeAction.DELETED, "carol"),
    ]
    assert (found[1].before, found[1].after) == (
        {"cron": "0 2 * * *", "jitter_s": 0},
        {"cron": "0 3 * * *", "jitter_s": 60},
    )
    assert found[3].before["task_path"] == "/tasks/rank.toml"
    assert store.schedules.changes("bats", 100) == []
    with pytest.raises(UnknownScheduleError):
        store.schedules.find("default", "nightly")


def test_names_are_unique_within_a_tenant_and_their_number_is_bounded(
    store: Store, clock: Clock
) -> None:
    add_schedule(store, clock)
    with pytest.raises(DuplicateScheduleError):
        add_schedule(store, clock)
    add_schedule(store, clock, tenant="bats")
    definition = Definition(cron="0 2 * * *", task_path="/t.toml")
    for number in range(MOST_OF_TENANT - 1):
        store.schedules.create(NewSchedule(f"n{number}", definition), "test", FIRST)
    with pytest.raises(TooManySchedulesError):
        add_schedule(store, clock, "one-more")
    pages = [store.schedules.overview("default", 60)]
    pages.append(store.schedules.overview("default", 60, pages[0][-1].schedule.id))
    assert [len(page) for page in pages] == [60, 40]


def test_old_runs_are_deleted_and_lists_show_the_newest(store: Store, clock: Clock) -> None:
    schedule, pass_ = add_schedule(store, clock), planner(store, clock, keep_days=2)
    for night in range(2):
        clock.moment = FIRST + night * DAY
        pass_.step()
        end(store, clock)
    (shown,) = store.schedules.overview("default", 9)
    assert shown.last_run is not None
    assert shown.last_run.planned_at == FIRST + DAY
    store.schedules.set_paused("default", schedule.id, "alice", None, paused=True)
    # Ids say when a run was made by this machine's clock.
    clock.moment = store.schedule_runs.clock() + 5 * DAY
    pass_.step()
    (shown,) = store.schedules.overview("default", 9)
    assert (shown.last_run, runs_of(store, schedule)) == (None, [])
    assert len(store.schedules.changes("default", 9)) == 2  # these are kept much longer


def upload(store: Store) -> str:
    file_id = store.files.begin(NewFile("default", "in.jsonl"))
    store.files.append(file_id, 0, ROW)
    return store.files.end(file_id, len(ROW), hashlib.sha256(ROW).hexdigest()).id


def of_file(store: Store, clock: Clock, file_id: str, **given: object) -> Schedule:
    return add_schedule(store, clock, file_id=file_id, endpoint="/v1/completions", **given)


def test_a_file_becomes_one_batch_a_night_also_when_the_planner_dies_in_between(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = of_file(store, clock, upload(store))
    clock.moment = FIRST
    with monkeypatch.context() as patch:  # it dies between the run and its batch
        patch.setattr(store.schedule_work, "files_to_begin", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            planner(store, clock).step()
    with monkeypatch.context() as patch:  # and between the batch and its note
        patch.setattr(store.schedule_work, "batch_made", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            planner(store, clock).step()
    planner(store, clock).step()
    (batch,) = store.batches.newest(9, "default")
    (run,) = runs_of(store, schedule)
    assert (run.state, run.job_id) == (RunState.COMPUTING, batch.job_id)
    assert batch.metadata == {"schedule": "nightly", "run": run.id}
    assert store.batch_work.fail(batch.job_id, [{"code": "x", "message": "no"}])
    planner(store, clock).step()
    (run,) = runs_of(store, schedule)
    assert (run.state, run.reason) == (
        RunState.FAILED,
        "the file cannot be used; the batch says why",
    )


def test_a_file_that_is_gone_fails_its_run(store: Store, clock: Clock) -> None:
    schedule = of_file(store, clock, "file-nobodys")
    clock.moment = FIRST
    planner(store, clock).step()
    (run,) = runs_of(store, schedule)
    assert run.state is RunState.FAILED
    assert run.reason == "there is no file 'file-nobodys'; it was deleted or has expired"


def test_the_batch_of_a_run_that_was_replaced_or_deleted_is_cancelled(
    store: Store, clock: Clock
) -> None:
    rule = WhenRunning.CANCEL
    schedule = of_file(store, clock, upload(store), when_still_running=rule, deadline_s=10**6)
    for night in range(2):
        clock.moment = FIRST + night * DAY
        planner(store, clock).step()
    planner(store, clock).step()
    store.batch_work.end_cancelled()
    second, first = store.batches.newest(9, "default")
    assert (first.status, second.status) == (BatchStatus.CANCELLED, BatchStatus.VALIDATING)
    store.schedules.delete("default", schedule.id, "alice")
    store.batch_work.end_cancelled()
    assert store.batches.get(second.id, "default").status is BatchStatus.CANCELLED
