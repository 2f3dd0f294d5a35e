"""From queued requests to dispatched micro-batches."""

from datetime import UTC, datetime, timedelta

import pytest

from nightjar.jobs.errors import StoreError
from nightjar.jobs.records import (
    EncodedRequest,
    MicroBatchRef,
    NewJob,
    NewMicroBatch,
    NewRequest,
    RequestError,
)
from nightjar.jobs.states import JobState, MicroBatchState, RequestKind
from nightjar.jobs.store import Store
from tests.jobs import planned, submit
from tests.outcomes import claim, codes, compute

GENERATE = RequestKind.GENERATE


def batch(*ids: int) -> NewMicroBatch:
    return NewMicroBatch(GENERATE, 32, list(ids), 3 * len(ids))


def encoded(*ids: int) -> list[EncodedRequest]:
    return [EncodedRequest(id_, [[1, 2, 3]]) for id_ in ids]


@pytest.fixture
def job_id(store: Store) -> str:
    return submit(store, [{"prompt": "a"}] * 4)


@pytest.fixture
def ids(store: Store, job_id: str) -> list[int]:
    return [item.id for item in store.backlog.queued_requests(job_id, 4)]


def test_a_plan(store: Store, job_id: str, ids: list[int]) -> None:
    refs = store.planning.save_plan(job_id, encoded(*ids), [batch(*ids[:3]), batch(ids[3])], [])
    assert [(ref.epoch, ref.job_id, ref.size, ref.tokens) for ref in refs] == [
        (0, job_id, 3, 9),
        (0, job_id, 1, 3),
    ]
    assert store.backlog.queued_requests(job_id, 4) == []
    assert store.backlog.jobs_to_plan() == []
    assert store.planning.dispatchable(10) == refs
    assert store.jobs.get(job_id).state is JobState.QUEUED
    assert store.jobs.get_in_detail(job_id)[1][MicroBatchState.READY] == 2


def test_each_of_many_micro_batches_has_its_own_requests(store: Store) -> None:
    job_id = submit(store, [{"prompt": "a"}] * 60)
    ids = [item.id for item in store.backlog.queued_requests(job_id, 60)]
    groups = [ids[begin : begin + 1 + begin % 4] for begin in range(0, 60, 5)]
    used = [id_ for group in groups for id_ in group]
    refs = store.planning.save_plan(job_id, encoded(*used), [batch(*group) for group in groups], [])
    assert [ref.size for ref in refs] == [len(group) for group in groups]
    assert [[item.id for item in claim(store, ref).requests] for ref in refs] == groups


def test_token_ids_come_back_at_the_claim(store: Store) -> None:
    job_id = submit(store, [{"query": "q", "documents": ["d", "e"]}])
    (request,) = store.backlog.queued_requests(job_id, 1)
    segments = [[7, 2**31 - 1], [1], [0, 5]]
    ranking = NewMicroBatch(RequestKind.RANK, 64, [request.id], 5)
    (ref,) = store.planning.save_plan(job_id, [EncodedRequest(request.id, segments)], [ranking], [])
    (claimed,) = claim(store, ref).requests
    assert claimed.segments == segments
    assert (claimed.kind, claimed.body) == (RequestKind.RANK, request.body)


def test_queued_requests_come_in_order_and_limited(store: Store, job_id: str) -> None:
    assert [item.index for item in store.backlog.queued_requests(job_id, 3)] == [0, 1, 2]


def test_requests_that_cannot_be_encoded_fail(store: Store, job_id: str, ids: list[int]) -> None:
    error = RequestError("context_exceeded", "too long", "body.prompt")
    store.planning.save_plan(job_id, encoded(*ids[:3]), [batch(*ids[:3])], [(ids[3], error)])
    (result,) = store.results.read(job_id)
    assert (result.index, result.error, result.status_code) == (3, error, 400)
    assert store.jobs.get(job_id).failed == 1


def test_a_job_whose_rows_are_all_refused_is_over(
    store: Store, job_id: str, ids: list[int]
) -> None:
    error = RequestError("context_exceeded", "too long")
    assert store.planning.save_plan(job_id, [], [], [(id_, error) for id_ in ids]) == []
    assert store.jobs.get(job_id).state is JobState.FAILED
    assert store.backlog.jobs_to_plan() == []


def plans_of(store: Store, statement: str, *parameters: str) -> str:
    """How the database would look for the queued requests, were there many."""
    engine = store.database.engine
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            explained = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            return str(explained.all())
        connection.exec_driver_sql("SET LOCAL enable_seqscan TO off")
        explained = connection.exec_driver_sql(f"EXPLAIN {statement}", parameters)
        return str(explained.all())


def refused(store: Store, ids: list[int], code: str) -> list[int]:
    """Ids of those that still wait, after a refusal."""
    (job,) = store.jobs.newest()
    error = RequestError(code, "refused", None)
    store.planning.save_plan(job.id, [], [], [(id_, error) for id_ in ids])
    return [item.id for item in store.backlog.queued_requests(job.id, 9)]


def test_refused_requests_wait_no_more(store: Store, job_id: str, ids: list[int]) -> None:
    assert refused(store, ids[:3], "context_length_exceeded") == [ids[3]]


def test_a_refusal_through_a_fault_of_ours_can_be_planned_again(
    store: Store, job_id: str, ids: list[int]
) -> None:
    assert refused(store, ids, "internal_error") == []
    assert store.retries.retry(job_id) == 4
    assert [item.id for item in store.backlog.queued_requests(job_id, 4)] == ids


def test_rows_that_wait_are_looked_for_behind_those_that_are_planned(
    store: Store, job_id: str
) -> None:
    statement = (
        "SELECT id FROM request WHERE job_id = ? AND state = 'queued' AND row_index >= "
        "(SELECT planned_to FROM job WHERE id = ?) ORDER BY row_index LIMIT 10"
    )
    if not store.database.is_sqlite:
        statement = statement.replace("?", "%s")
    plan = plans_of(store, statement, job_id, job_id)
    assert "job_id_row_index_key" in plan or "(job_id=? AND row_index>?)" in plan, plan


def test_planning_twice_stores_it_once(store: Store, job_id: str, ids: list[int]) -> None:
    error = RequestError("context_exceeded", "too long")
    plan = (encoded(*ids[:3]), [batch(*ids[:3])], [(ids[3], error)])
    assert len(store.planning.save_plan(job_id, *plan)) == 1
    assert store.planning.save_plan(job_id, *plan) == []
    assert len(store.planning.dispatchable(10)) == 1
    assert codes(store.results.read(job_id)) == ["context_exceeded"]


def test_a_micro_batch_of_which_a_part_is_planned_is_left_out(
    store: Store, job_id: str, ids: list[int]
) -> None:
    store.planning.save_plan(job_id, encoded(ids[1]), [batch(ids[1])], [])
    refs = store.planning.save_plan(job_id, encoded(*ids), [batch(*ids[:2]), batch(*ids[2:])], [])
    assert [ref.size for ref in refs] == [2]
    assert [item.id for item in store.backlog.queued_requests(job_id, 4)] == [ids[0]]


def test_a_plan_that_contradicts_itself_is_refused(
    store: Store, job_id: str, ids: list[int]
) -> None:
    for batches in ([batch(ids[0], ids[1])], [batch(ids[0]), batch(ids[0])], [batch()]):
        with pytest.raises(StoreError, match="every micro-batch"):
            store.planning.save_plan(job_id, encoded(ids[0]), batches, [])
    assert len(store.backlog.queued_requests(job_id, 9)) == 4


def test_an_empty_plan_is_nothing(store: Store, job_id: str) -> None:
    assert store.planning.save_plan(job_id, [], [], []) == []


def test_requests_of_another_job_are_not_planned(store: Store, ids: list[int]) -> None:
    other = submit(store, [{"prompt": "b"}])
    assert store.planning.save_plan(other, encoded(*ids), [batch(*ids)], []) == []


def test_the_window_bounds_what_is_in_flight(store: Store) -> None:
    _, refs = planned(store, 5)
    assert store.planning.dispatchable(3) == refs[:3]
    store.planning.mark_dispatched(refs[:2])
    assert store.planning.dispatchable(3) == refs[2:3]
    claim(store, refs[0])  # leased counts as in flight too
    assert store.planning.dispatchable(3) == refs[2:3]
    assert store.planning.dispatchable(2) == []
    assert store.planning.dispatched() == refs[1:2]


def submit_ranked(store: Store, priority: int) -> str:
    row = NewRequest(0, 1, "row-0", GENERATE, {"prompt": "a"})
    with store.jobs.submit(NewJob("tiny", priority=priority)) as submission:
        submission.add([row])
    return submission.job_id


def plan_whole(store: Store, job_id: str) -> list[MicroBatchRef]:
    (request,) = store.backlog.queued_requests(job_id, 1)
    return store.planning.save_plan(job_id, encoded(request.id), [batch(request.id)], [])


def test_a_job_of_higher_priority_goes_before_earlier_ones(store: Store) -> None:
    bulk, higher, lower, late_bulk = (submit_ranked(store, level) for level in (0, 9, 1, 0))
    order = [higher, lower, bulk, late_bulk]
    assert store.backlog.jobs_to_plan() == order
    for job_id in (bulk, higher, lower, late_bulk):
        plan_whole(store, job_id)
    refs = store.planning.dispatchable(9)
    assert [ref.job_id for ref in refs] == order
    assert [ref.urgent for ref in refs] == [True, True, False, False]
    assert [ref.job_id for ref in store.planning.dispatchable(3)] == order[:3]


def test_a_job_that_has_waited_goes_before_urgent_ones_that_came_long_after(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = datetime(2026, 11, 21, tzinfo=UTC)
    jobs = {}
    for hours, priority in ((0, 0), (1.9, 2), (2.1, 2)):
        moment = start + timedelta(hours=hours)
        monkeypatch.setattr("nightjar.jobs.store.submission.now", lambda moment=moment: moment)
        jobs[hours] = submit_ranked(store, priority)
        plan_whole(store, jobs[hours])
    assert [ref.job_id for ref in store.planning.dispatchable(9)] == [jobs[1.9], jobs[0], jobs[2.1]]


def test_the_oldest_job_is_dispatched_first(store: Store) -> None:
    older = submit(store, [{"prompt": "a"}])
    _, newer_refs = planned(store, 2)
    (request,) = store.backlog.queued_requests(older, 1)
    older_refs = store.planning.save_plan(older, encoded(request.id), [batch(request.id)], [])
    assert store.planning.dispatchable(9) == [*older_refs, *newer_refs]


def test_marking_and_requeueing_respect_state_and_epoch(store: Store) -> None:
    _, (first, second) = planned(store, 2)
    claimed = claim(store, first)  # before the dispatcher could mark it
    store.planning.mark_dispatched([second, first])
    assert store.planning.dispatched() == [second]
    assert store.leases.give_back(claimed.id, claimed.epoch, "worker")
    store.planning.mark_dispatched([first])  # the old epoch's message
    assert store.planning.dispatched() == [second]
    store.planning.requeue([second, first])
    assert store.planning.dispatched() == []
    assert [ref.epoch for ref in store.planning.dispatchable(9)] == [1, 0]
    store.planning.mark_dispatched([])


def test_the_window_counts_what_earlier_jobs_have_taken_of_it(store: Store) -> None:
    first, second, third = (planned(store, 2)[1] for _ in range(3))
    assert store.planning.dispatchable(3) == [*first, second[0]]
    assert store.planning.dispatchable(5) == [*first, *second, third[0]]
    store.planning.mark_dispatched(first)
    assert compute(store, first[0])
    claim(store, first[1])
    assert store.planning.dispatchable(3) == second  # one is in flight, of another job
    assert store.planning.dispatchable(1) == []


def test_many_leases_make_room_for_more_messages(store: Store) -> None:
    _, refs = planned(store, 12)
    assert len(store.planning.dispatchable(2, per_lease=3)) == 2
    for ref in refs[:3]:
        claim(store, ref)
    store.planning.mark_dispatched(refs[3:5])
    assert store.planning.dispatchable(2) == []
    assert store.planning.dispatchable(2, per_lease=3) == refs[5:9]  # nine in all
    assert store.planning.dispatchable(11, per_lease=3) == refs[5:11]
