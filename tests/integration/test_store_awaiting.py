"""Which rows wait to be planned: nothing before `planned_to` does, and whatever waits is found."""

import pytest
import sqlalchemy as sa

from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import (
    EncodedRequest,
    NewJob,
    NewMicroBatch,
    NewRequest,
    NewResult,
    PlannedCall,
    PlanningRange,
    RejectedRow,
    RequestError,
)
from nightjar.jobs.states import RequestKind, RequestState
from nightjar.jobs.store import Store
from nightjar.jobs.store.submission import new_job_id
from nightjar.jobs.store.tables import job, request
from tests.jobs import planned, submit, submit_for
from tests.outcomes import claim, compute


def planned_to(store: Store, job_id: str) -> int:
    with store.database.reading() as connection:
        return connection.scalar(sa.select(job.c.planned_to).where(job.c.id == job_id)) or 0


def plan(store: Store, job_id: str, first: int, end: int) -> None:
    """Plan these rows of a job, those of them that wait."""
    within = PlanningRange(job_id, first, end, is_lowest=True)
    queued = store.backlog.queued_requests(job_id, 99, within=within)
    batch = NewMicroBatch(RequestKind.GENERATE, 32, [one.id for one in queued], len(queued))
    encoded = [EncodedRequest(one.id, [[1]]) for one in queued]
    store.planning.save_plan(job_id, encoded, [batch])


def waiting(store: Store, job_id: str) -> list[int]:
    return [one.index for one in store.backlog.queued_requests(job_id, 99)]


def test_it_rises_with_the_plans(store: Store) -> None:
    job_id = submit_for(store, "default", 9)
    assert planned_to(store, job_id) == 0
    plan(store, job_id, 0, 4)
    assert (planned_to(store, job_id), waiting(store, job_id)) == (4, [4, 5, 6, 7, 8])
    plan(store, job_id, 4, 9)
    assert (planned_to(store, job_id), waiting(store, job_id)) == (9, [])
    assert store.backlog.jobs_to_plan() == []


def test_it_waits_for_the_lowest_of_several_planners(store: Store) -> None:
    job_id = submit_for(store, "default", 9)
    plan(store, job_id, 3, 6)
    assert (planned_to(store, job_id), waiting(store, job_id)) == (0, [0, 1, 2, 6, 7, 8])
    plan(store, job_id, 6, 9)
    assert planned_to(store, job_id) == 0
    plan(store, job_id, 0, 3)
    assert planned_to(store, job_id) == 9


def test_rows_that_are_refused_or_cannot_be_planned_are_passed(store: Store) -> None:
    job_id = submit_for(store, "default", 5)
    queued = store.backlog.queued_requests(job_id, 2)
    refused = [(one.id, RequestError("context_exceeded", "too long")) for one in queued]
    store.planning.save_plan(job_id, [], [], refused)
    assert planned_to(store, job_id) == 2
    assert store.backlog.fail_unplanned(job_id, RequestError("broken", "no plan")) == 3
    assert planned_to(store, job_id) == 5


def test_a_retry_lowers_it(store: Store) -> None:
    job_id, refs = planned(store, 4)
    for ref in refs[:3]:
        claimed = claim(store, ref)
        failed = NewResult.failure(claimed.requests[0].id, "broken", "no", status=500)
        assert store.leases.finish(ref.id, ref.epoch, "worker", [failed])
    assert compute(store, refs[3])
    assert planned_to(store, job_id) == 4
    assert store.retries.retry(job_id) == 3
    assert (planned_to(store, job_id), waiting(store, job_id)) == (0, [0, 1, 2])


def test_plans_that_are_taken_apart_lower_it(store: Store) -> None:
    jobs = [planned(store, 3, each=1) for _ in range(2)]
    for _, refs in jobs:
        assert compute(store, refs[0])
    store.replanning.take_apart_others(["another model"], 9)
    for job_id, _ in jobs:
        assert (planned_to(store, job_id), waiting(store, job_id)) == (1, [1, 2])


def test_appended_rows_are_behind_it(store: Store) -> None:
    opened, _ = store.appending.open(NewJob("tiny", merge_equal=False))
    body = validate_body(RequestKind.GENERATE, {"prompt": "a", "max_tokens": 4})
    for first in (0, 3):
        rows = [
            NewRequest(n, n + 1, f"row-{n}", RequestKind.GENERATE, body)
            for n in range(first, first + 3)
        ]
        store.appending.append(opened.id, first, rows, f"digest {first}")
        assert waiting(store, opened.id) == [first, first + 1, first + 2]
        plan(store, opened.id, first, first + 3)
        assert planned_to(store, opened.id) == first + 3


def test_cancelled_rows_are_passed(store: Store) -> None:
    job_id = submit_for(store, "default", 5)
    plan(store, job_id, 0, 2)
    store.stopping.cancel(job_id)
    assert planned_to(store, job_id) == 5
    assert store.jobs.get(job_id).cancelled == 5


@pytest.mark.parametrize("row", [0, 4])
def test_rows_that_a_process_of_the_version_before_queued_are_found(store: Store, row: int) -> None:
    """It knows no `planned_to`: the sweeper lowers it once nothing else of the job is under way."""
    job_id, refs = planned(store, 5, each=2)
    for ref in refs[:2]:
        assert compute(store, ref)
    again = sa.update(request).where(request.c.job_id == job_id, request.c.row_index == row)
    back = again.values(state=RequestState.QUEUED, micro_batch_id=None)
    store.database.write(lambda connection: connection.execute(back))
    assert store.planned_to.correct() == 0  # the last micro-batch may still be under way
    ended = sa.text("UPDATE micro_batch SET state = 'replanned' WHERE state = 'ready'")
    store.database.write(lambda connection: connection.execute(ended))
    assert store.backlog.jobs_to_plan() == []
    assert store.planned_to.correct() == 1
    assert (planned_to(store, job_id), waiting(store, job_id)) == (row, [row])
    assert store.planned_to.correct() == 0


def test_rows_that_a_process_of_the_version_before_planned_are_passed(store: Store) -> None:
    job_id, _ = planned(store, 3)
    before = sa.update(job).where(job.c.id == job_id).values(planned_to=0)
    store.database.write(lambda connection: connection.execute(before))
    assert store.backlog.jobs_to_plan() == []
    assert store.planned_to.correct() == 1
    assert planned_to(store, job_id) == 3


def test_a_job_begins_with_its_first_accepted_row(store: Store) -> None:
    body = validate_body(RequestKind.GENERATE, {"prompt": "a", "max_tokens": 4})
    with store.jobs.submit(NewJob("tiny")) as submission:
        submission.add([RejectedRow(n, n + 1, None, "invalid_json", "no") for n in range(3)])
        submission.add([NewRequest(3, 4, "row-3", RequestKind.GENERATE, body)])
    assert planned_to(store, submission.job_id) == 3
    assert store.backlog.jobs_to_plan() == [submission.job_id]


def test_a_call_that_is_planned_at_once_waits_for_nothing(store: Store) -> None:
    """Else each sweep would mend it."""
    job_id = new_job_id()
    encoded = EncodedRequest(0, [[1]])
    call = PlannedCall(encoded, NewMicroBatch(RequestKind.GENERATE, 32, [0], 1), "model")
    body = validate_body(RequestKind.GENERATE, {"prompt": "a", "max_tokens": 4})
    store.live.submit(NewJob("tiny"), job_id, RequestKind.GENERATE, body, call)
    assert store.planned_to.correct() == 0
    assert planned_to(store, job_id) == 1


def test_followers_alone_are_nothing_to_plan(store: Store) -> None:
    rows: list[dict[str, object]] = [{"prompt": "a", "max_tokens": 4, "temperature": 0}] * 3
    job_id = submit(store, rows, merge_equal=True)
    plan(store, job_id, 0, 3)
    assert planned_to(store, job_id) == 3
    assert store.planned_to.correct() == 0
