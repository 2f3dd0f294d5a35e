"""Token ids and bodies beside the requests' rows: who reads them, and when they go."""

import sqlalchemy as sa

from nightjar.jobs.records import (
    EncodedRequest,
    MicroBatchRef,
    NewMicroBatch,
)
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.store.tables import body_pack, micro_batch_tokens, request
from nightjar.jobs.workers import Crash
from tests.jobs import planned, submit
from tests.outcomes import answers, claim, compute

DIED = Crash("the worker died", allowed=1)


def holders(store: Store) -> set[int]:
    """The micro-batches whose token ids are stored."""
    with store.database.reading() as connection:
        return set(connection.scalars(sa.select(micro_batch_tokens.c.micro_batch_id)))


def told_apart(store: Store, rows: int) -> str:
    """A job of one micro-batch; the token ids of row n are [n], [n, 70_000 + n]."""
    job_id = submit(store, [{"prompt": f"row {n}", "max_tokens": 4} for n in range(rows)])
    queued = store.backlog.queued_requests(job_id, rows)
    encoded = [
        EncodedRequest(one.id, [[one.index], [one.index, 70_000 + one.index]]) for one in queued
    ]
    batch = NewMicroBatch(RequestKind.GENERATE, 32, [one.id for one in queued], 3 * rows)
    store.planning.save_plan(job_id, encoded, [batch])
    return job_id


def ready(store: Store) -> list[MicroBatchRef]:
    return store.planning.dispatchable(99)


def test_each_suspect_keeps_its_own_token_ids(store: Store) -> None:
    told_apart(store, 5)
    for _ in range(4):  # until each is alone
        refs = ready(store)
        claimed = [one for ref in refs for one in claim(store, ref, "dead").requests]
        assert {one.index: (one.body["prompt"], one.segments) for one in claimed} == {
            n: (f"row {n}", [[n], [n, 70_000 + n]]) for n in range(5)
        }
        assert holders(store) == {ref.id for ref in refs}
        store.suspects.add_owner("dead", Crash("it died", allowed=9))
    assert len(refs) == 5


def test_token_ids_go_with_the_micro_batch(store: Store) -> None:
    _, refs = planned(store, 4)
    assert holders(store) == {ref.id for ref in refs}
    assert compute(store, refs[0])
    claim(store, refs[1], "leaves")
    store.leases.give_back_all("leaves")
    assert holders(store) == {ref.id for ref in refs[1:]}
    store.replanning.take_apart_others(["another model"], 9)
    assert holders(store) == set()


def test_token_ids_of_a_cancelled_job_go(store: Store) -> None:
    job_id, refs = planned(store, 3)
    leased = claim(store, refs[0])
    store.stopping.cancel(job_id)
    assert holders(store) == {leased.id}
    assert store.leases.finish(leased.id, leased.epoch, "worker", answers(leased))
    assert holders(store) == set()


def test_what_crashed_is_tried_again_with_its_token_ids(store: Store) -> None:
    job_id = told_apart(store, 2)
    (ref,) = ready(store)
    claim(store, ref, "dead")
    store.suspects.add_owner("dead", DIED)
    for ref in ready(store):
        claim(store, ref, "dead")
    store.suspects.add_owner("dead", DIED)
    assert store.jobs.get(job_id).failed == 2
    assert len(holders(store)) == 2
    assert store.retries.retry(job_id) == 2
    again = ready(store)
    assert holders(store) == {ref.id for ref in again}
    claimed = [claim(store, ref) for ref in again]
    assert [one.requests[0].segments for one in claimed] == [[[n], [n, 70_000 + n]] for n in (0, 1)]
    for one in claimed:
        assert store.leases.finish(one.id, one.epoch, "worker", answers(one))
    assert holders(store) == set()


def test_a_plan_that_is_overtaken_stores_no_token_ids(store: Store) -> None:
    job_id = submit(store, [{"prompt": "a", "max_tokens": 4}] * 2)
    queued = store.backlog.queued_requests(job_id, 2)
    encoded = [EncodedRequest(one.id, [[7]]) for one in queued]
    batches = [NewMicroBatch(RequestKind.GENERATE, 32, [one.id], 1) for one in queued]
    (first,) = store.planning.save_plan(job_id, encoded, batches[:1])
    (second,) = store.planning.save_plan(job_id, encoded, batches)
    assert holders(store) == {first.id, second.id}
    assert [one.requests[0].segments for one in (claim(store, first), claim(store, second))] == [
        [[7]]
    ] * 2


def test_rows_and_plans_of_the_version_before_are_read_where_they_are(store: Store) -> None:
    """An older API put bodies into the requests' rows, and its planner token ids."""
    job_id, (ref, _) = planned(store, 2)
    old = bytes.fromhex("0200000001000000010000000100000002010000")  # [1], [258]
    with store.database.engine.execution_options(nightjar_write=True).begin() as connection:
        moved = {"body": '{"prompt":"a","max_tokens":4,"temperature":0.0}', "segments": old}
        connection.execute(sa.update(request).values(moved))
        connection.execute(sa.delete(body_pack))
        connection.execute(sa.delete(micro_batch_tokens))
    (one,) = claim(store, ref).requests
    assert (one.body["prompt"], one.segments) == ("a", [[1], [258]])
    store.replanning.take_apart_others(["another model"], 9)
    (waiting,) = store.backlog.queued_requests(job_id, 9)
    assert waiting.body["prompt"] == "a"
    assert waiting.size == len('{"prompt":"a","max_tokens":4,"temperature":0.0}')
    assert store.previews.asked([waiting.id])[waiting.id]["prompt"] == "a"
