"""Equal requests of a job: one is computed, and its end is the end of all of them, once each."""

import pytest
import sqlalchemy as sa

from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import (
    EncodedRequest,
    MicroBatchRef,
    NewJob,
    NewMicroBatch,
    NewRequest,
    NewResult,
    RejectedRow,
    RequestError,
)
from nightjar.jobs.states import JobState, RequestKind, RequestState
from nightjar.jobs.store import Store, following, retrying
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.tables import job, request, result
from nightjar.jobs.workers import Crash
from nightjar.pipeline.queue.sweeper import Sweeper
from tests.jobs import Body, submit
from tests.outcomes import answers, claim, codes, compute

pytestmark = pytest.mark.one_database

GREEDY: Body = {"prompt": "a", "max_tokens": 4, "temperature": 0}
OTHER: Body = {"prompt": "b", "max_tokens": 4, "temperature": 0}
CRASH = Crash("the compute process was ended by SIGSEGV", allowed=1)


def queued(store: Store, job_id: str) -> list[str]:
    """The rows that are to be computed."""
    return [item.custom_id for item in store.backlog.queued_requests(job_id, 10_000)]


def plan(store: Store, job_id: str, *, each: int = 10) -> list[MicroBatchRef]:
    ids = [item.id for item in store.backlog.queued_requests(job_id, 10_000)]
    groups = [ids[start : start + each] for start in range(0, len(ids), each)]
    return store.planning.save_plan(
        job_id,
        [EncodedRequest(id_, [[1, 2, 3]]) for id_ in ids],
        [NewMicroBatch(RequestKind.GENERATE, 32, group, 7) for group in groups],
    )


def merged(store: Store, bodies: list[Body]) -> str:
    return submit(store, bodies, merge_equal=True)


def test_equal_greedy_requests_are_computed_once(store: Store) -> None:
    job_id = merged(store, [GREEDY, OTHER, GREEDY, OTHER, GREEDY])
    assert queued(store, job_id) == ["row-0", "row-1"]
    (ref,) = plan(store, job_id)
    assert compute(store, ref)
    found = store.jobs.get(job_id)
    assert (found.state, found.completed, found.total) == (JobState.COMPLETED, 5, 5)
    assert (found.reused, found.reused_tokens) == (3, 15)
    assert (found.prompt_tokens, found.completion_tokens) == (15, 10)
    assert (found.requested_tokens, found.saved_tokens) == (20, 10)


def test_an_answer_that_is_shared_says_so_under_its_own_id(store: Store) -> None:
    job_id = merged(store, [GREEDY] * 2)
    (ref,) = plan(store, job_id)
    claimed = claim(store, ref)
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    leader = claimed.requests[0].id
    body = {"id": f"cmpl-{leader}", "usage": usage, "recomputed_in": "fp32"}
    assert store.leases.finish(ref.id, 0, "worker", [NewResult(leader, 200, body)])
    computed, shared = store.results.read(job_id)
    assert computed.body == body
    assert shared.body == body | {"id": f"cmpl-{shared.id}", "reused": "job"}
    assert (shared.custom_id, shared.line, shared.index) == ("row-1", 2, 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(GREEDY | {"seed": 1}, GREEDY | {"seed": 2}, id="greedy, whatever the seed"),
        pytest.param(GREEDY, GREEDY | {"top_p": 1.0, "user": "x"}, id="defaults written out"),
        pytest.param({"prompt": "a", "seed": 7}, {"seed": 7, "prompt": "a"}, id="drawn, same seed"),
        pytest.param(
            {"prompt": "a", "beam_width": 2}, {"prompt": "a", "beam_width": 2}, id="beams"
        ),
        pytest.param(
            {"query": "q", "documents": ["d", {"text": "e"}]},
            {"query": "q", "documents": ["d", "e"], "top_n": None},
            id="rankings",
        ),
    ],
)
def test_what_is_equal(store: Store, first: Body, second: Body) -> None:
    assert queued(store, merged(store, [first, second])) == ["row-0"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({"prompt": "a"}, {"prompt": "a"}, id="drawn with seeds of their own"),
        pytest.param({"prompt": "a", "seed": 1}, {"prompt": "a", "seed": 2}, id="other seed"),
        pytest.param(GREEDY, GREEDY | {"max_tokens": 5}, id="other length"),
        pytest.param(GREEDY, GREEDY | {"prompt_vector": "p"}, id="prompt vector"),
        pytest.param(GREEDY | {"adapter": "b"}, GREEDY | {"adapter": "a"}, id="adapter"),
        pytest.param(GREEDY, GREEDY | {"stop": ["\n"]}, id="stop"),
        pytest.param(
            {"query": "q", "documents": ["d", "e"]},
            {"query": "q", "documents": ["e", "d"]},
            id="other order of documents",
        ),
        pytest.param(
            {"query": "q", "documents": ["d", "e"]},
            {"query": "q", "documents": ["d", "e"], "top_n": 1},
            id="top_n",
        ),
        pytest.param(
            {"query": "q", "documents": ["d", "e"]},
            {"query": "qd", "documents": ["e"]},
            id="other border of query and documents",
        ),
    ],
)
def test_what_is_not_equal(store: Store, first: Body, second: Body) -> None:
    assert queued(store, merged(store, [first, second])) == ["row-0", "row-1"]


def test_merging_can_be_left(store: Store) -> None:
    assert len(queued(store, submit(store, [GREEDY] * 3, merge_equal=False))) == 3


def test_equal_requests_of_two_jobs_are_strangers(store: Store) -> None:
    jobs = [merged(store, [GREEDY]) for _ in range(2)]
    assert [queued(store, job_id) for job_id in jobs] == [["row-0"]] * 2


def test_a_leader_has_a_bounded_following(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MOST_EQUAL", 4)
    job_id = merged(store, [GREEDY] * 10)
    assert queued(store, job_id) == ["row-0", "row-4", "row-8"]
    for ref in plan(store, job_id, each=1):
        assert compute(store, ref)
    assert [item.custom_id for item in store.results.read(job_id)] == [
        f"row-{n}" for n in range(10)
    ]
    assert store.jobs.get(job_id).reused == 7


def test_rejected_rows_lead_nobody(store: Store) -> None:
    body = validate_body(RequestKind.GENERATE, GREEDY)
    rows = [
        RejectedRow(0, 1, None, "invalid_json", "broken"),
        NewRequest(1, 2, "same", RequestKind.GENERATE, body),
        NewRequest(2, 3, "same", RequestKind.GENERATE, body),  # its custom_id was used
        NewRequest(3, 4, "other", RequestKind.GENERATE, body),
    ]
    with store.jobs.submit(NewJob("tiny")) as submission:
        submission.add(rows)
    assert (submission.accepted, submission.rejected) == (2, 2)
    assert queued(store, submission.job_id) == ["same"]
    (ref,) = plan(store, submission.job_id)
    assert compute(store, ref)
    assert codes(store.results.read(submission.job_id)) == [
        "invalid_json",
        None,
        "duplicate_custom_id",
        None,
    ]


def test_a_refused_leader_refuses_its_followers(store: Store) -> None:
    job_id = merged(store, [GREEDY] * 3)
    (leader,) = store.backlog.queued_requests(job_id, 9)
    error = RequestError("context_length_exceeded", "too long", "body.prompt")
    store.planning.save_plan(job_id, [], [], [(leader.id, error)])
    found = store.jobs.get(job_id)
    assert (found.state, found.failed, found.reused) == (JobState.FAILED, 3, 0)
    assert [item.error for item in store.results.read(job_id)] == [error] * 3


def test_a_poisonous_leader_dies_once_for_all(store: Store) -> None:
    job_id = merged(store, [GREEDY, OTHER, GREEDY])
    refs = plan(store, job_id)
    while refs:
        claimed = claim(store, refs[0])
        if claimed.isolated and claimed.requests[0].custom_id == "row-1":
            assert store.leases.finish(claimed.id, claimed.epoch, "worker", answers(claimed))
        else:
            assert store.suspects.add(claimed.id, claimed.epoch, "worker", CRASH)
        refs = store.planning.dispatchable(9)
    assert codes(store.results.read(job_id)) == ["compute_lost", None, "compute_lost"]
    assert store.jobs.get(job_id).state is JobState.COMPLETED_WITH_FAILURES


def test_a_lease_that_is_given_back_ends_nobody(store: Store) -> None:
    job_id = merged(store, [GREEDY] * 2)
    (ref,) = plan(store, job_id)
    claim(store, ref)
    assert store.leases.give_back(ref.id, 0, "worker")
    assert store.results.read(job_id) == []
    (again,) = store.planning.dispatchable(9)
    assert compute(store, again)
    assert store.jobs.get(job_id).completed == 2


def test_a_cancel_before_the_leader_begins_ends_all(store: Store) -> None:
    job_id = merged(store, [GREEDY] * 3)
    assert store.stopping.cancel(job_id).state is JobState.CANCELLED
    assert codes(store.results.read(job_id)) == ["cancelled"] * 3
    planned = merged(store, [GREEDY] * 3)
    plan(store, planned)
    assert store.stopping.cancel(planned).state is JobState.CANCELLED
    assert codes(store.results.read(planned)) == ["cancelled"] * 3


def test_followers_of_a_running_leader_get_what_it_lands_after_a_cancel(store: Store) -> None:
    job_id = merged(store, [GREEDY, GREEDY, OTHER])
    first, _ = plan(store, job_id, each=1)
    claimed = claim(store, first)
    assert store.stopping.cancel(job_id).state is JobState.CANCELLING
    assert codes(store.results.read(job_id)) == ["cancelled"]
    assert store.leases.finish(first.id, 0, "worker", answers(claimed))
    assert codes(store.results.read(job_id)) == [None, None, "cancelled"]
    assert store.jobs.get(job_id).state is JobState.CANCELLED


def test_followers_end_with_a_running_leader_that_leaves_its_work_after_a_cancel(
    store: Store,
) -> None:
    job_id = merged(store, [GREEDY] * 2)
    (ref,) = plan(store, job_id)
    claim(store, ref)
    store.stopping.cancel(job_id)
    assert store.leases.give_back(ref.id, 0, "worker")
    assert codes(store.results.read(job_id)) == ["cancelled"] * 2
    assert store.jobs.get(job_id).state is JobState.CANCELLED


def test_retrying_a_leader_retries_its_followers(store: Store) -> None:
    job_id = merged(store, [GREEDY, OTHER, GREEDY])
    (ref,) = plan(store, job_id)
    claim(store, ref)
    assert store.leases.fail(ref.id, 0, "worker", RequestError("internal_error", "x"))
    assert store.jobs.get(job_id).failed == 3
    assert store.retries.retry(job_id) == 3
    assert (store.jobs.get(job_id).failed, store.jobs.get(job_id).is_over) == (0, False)
    assert queued(store, job_id) == ["row-0", "row-1"]
    (again,) = plan(store, job_id)
    assert compute(store, again)
    found = store.jobs.get(job_id)
    assert (found.state, found.completed, found.reused) == (JobState.COMPLETED, 3, 1)


def test_a_poisonous_leader_is_retried_alone_and_its_followers_wait(store: Store) -> None:
    job_id = merged(store, [GREEDY] * 3)
    refs = plan(store, job_id)
    while refs:
        claimed = claim(store, refs[0])
        assert store.suspects.add(claimed.id, claimed.epoch, "worker", CRASH)
        refs = store.planning.dispatchable(9)
    assert store.retries.retry(job_id) == 3
    (alone,) = store.planning.dispatchable(9)
    assert (alone.size, alone.isolated) == (1, True)
    assert queued(store, job_id) == []
    assert compute(store, alone)
    assert store.jobs.get(job_id).state is JobState.COMPLETED


def test_a_follower_that_is_retried_after_its_leader_has_its_answer_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retrying goes in steps, and the leader of a step before may have been computed since."""
    monkeypatch.setattr(retrying, "REQUESTS_PER_STEP", 1)
    job_id = merged(store, [GREEDY] * 2)
    (ref,) = plan(store, job_id)
    claim(store, ref)
    assert store.leases.fail(ref.id, 0, "worker", RequestError("internal_error", "x"))
    store.database.write(lambda connection: len(store.retries.take_back(connection, job_id, -1)))
    (again,) = plan(store, job_id)
    assert compute(store, again)
    assert codes(store.results.read(job_id)) == [None, "internal_error"]
    assert store.retries.retry(job_id) == 1
    assert codes(store.results.read(job_id)) == [None, None]
    found = store.jobs.get(job_id)
    assert (found.state, found.completed, found.failed) == (JobState.COMPLETED, 2, 0)


def leave_behind(database_url: str) -> None:
    """Followers of ended leaders wait again, as a worker of the version before leaves them."""
    database = Database(database_url)
    led = request.c.leader_id.is_not(None)
    with database.engine.begin() as connection:
        rows = connection.execute(sa.select(request.c.id).where(led)).scalars().all()
        connection.execute(sa.delete(result).where(result.c.request_id.in_(rows)))
        connection.execute(sa.update(request).where(led).values(state=RequestState.FOLLOWING))
        of_job = sa.select(sa.func.count()).where(request.c.job_id == job.c.id, led)
        completed = job.c.completed - of_job.scalar_subquery()
        counters = {"completed": completed, "reused": 0, "reused_tokens": 0}
        unfinished = {"state": JobState.RUNNING, "finished_at": None}
        connection.execute(sa.update(job).values(**counters, **unfinished))
    database.close()


def test_followers_that_an_older_worker_left_are_landed(store: Store, database_url: str) -> None:
    job_id = merged(store, [GREEDY] * 5)
    (ref,) = plan(store, job_id)
    assert store.orphans.land() == 0
    assert compute(store, ref)
    leave_behind(database_url)
    assert store.jobs.get(job_id).completed == 1
    assert store.orphans.land() == 4
    assert store.orphans.land() == 0
    found = store.jobs.get(job_id)
    assert (found.state, found.completed, found.reused) == (JobState.COMPLETED, 5, 4)


def test_one_sweep_lands_what_was_left_of_several_jobs(store: Store, database_url: str) -> None:
    jobs = [merged(store, [GREEDY] * 3) for _ in range(2)]
    for job_id in jobs:
        (ref,) = plan(store, job_id)
        assert compute(store, ref)
    leave_behind(database_url)
    assert [store.jobs.get(job_id).completed for job_id in jobs] == [1, 1]
    Sweeper(
        store, dead_after_s=10, redispatch_after_s=60, longest_gap_s=4, deaths_allowed=3
    ).sweep()
    assert [store.jobs.get(job_id).completed for job_id in jobs] == [3, 3]
