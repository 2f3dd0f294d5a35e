"""Suspects in SQL: halved until alone, counted only there, and nobody else pays."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightjar.jobs.errors import StoreError
from nightjar.jobs.records import MicroBatchRef
from nightjar.jobs.states import JobState, MicroBatchState
from nightjar.jobs.store import Store
from nightjar.jobs.store.ready import _SUSPECTS
from nightjar.jobs.workers import Crash
from tests.jobs import planned
from tests.outcomes import answers, claim, codes, compute

CRASH = Crash("the compute process was ended by SIGSEGV", allowed=3)


def crash(store: Store, ref: MicroBatchRef, how: Crash = CRASH) -> None:
    """Claim a micro-batch, and lose its compute process before any answer."""
    claimed = claim(store, ref)
    assert store.suspects.add(claimed.id, claimed.epoch, "worker", how)


def ready(store: Store) -> list[MicroBatchRef]:
    return store.planning.dispatchable(1_000)


def isolate(store: Store, guilty: set[str]) -> int:
    """Play the worker until nothing waits; whoever computes a guilty request crashes."""
    crashes = 0
    while refs := ready(store):
        claimed = claim(store, refs[0])
        if guilty & {request.custom_id for request in claimed.requests}:
            crashes += 1
            assert store.suspects.add(claimed.id, claimed.epoch, "worker", CRASH)
        else:
            assert store.leases.finish(claimed.id, claimed.epoch, "worker", answers(claimed))
    return crashes


def test_a_crash_splits_the_micro_batch_into_halves_that_are_computed_alone(store: Store) -> None:
    job_id, (ref,) = planned(store, 5, each=5)
    assert not ref.isolated
    crash(store, ref)
    halves = ready(store)
    assert [(half.size, half.epoch, half.isolated) for half in halves] == [
        (3, 0, True),
        (2, 0, True),
    ]
    assert [half.tokens for half in halves] == [21, 14]
    assert store.jobs.get_in_detail(job_id)[1][MicroBatchState.SPLIT] == 1
    assert store.leases.claim(ref.id, 1, "worker") is None
    claimed = [claim(store, half) for half in halves]
    assert all(half.isolated for half in claimed)
    names = [request.custom_id for half in claimed for request in half.requests]
    assert names == [f"row-{n}" for n in range(5)]


def test_what_was_answered_before_the_crash_lands(store: Store) -> None:
    job_id, (ref,) = planned(store, 4, each=4)
    claimed = claim(store, ref)
    assert store.suspects.add(ref.id, 0, "worker", CRASH, answers(claimed)[:3])
    assert [result.index for result in store.results.read(job_id)] == [0, 1, 2]
    (rest,) = ready(store)
    assert (rest.size, rest.isolated) == (1, True)
    assert store.jobs.get(job_id).completed == 3


def test_a_crash_after_the_last_answer_blames_nobody(store: Store) -> None:
    job_id, (ref,) = planned(store, 2, each=2)
    assert store.suspects.add(ref.id, 0, "worker", CRASH) is False
    claimed = claim(store, ref)
    assert store.suspects.add(ref.id, 0, "worker", CRASH, answers(claimed))
    assert store.jobs.get(job_id).state is JobState.COMPLETED
    assert ready(store) == []


def test_only_crashes_alone_are_counted(store: Store) -> None:
    """One request in its micro-batch, but others in flight beside it: that does not count."""
    job_id, (ref,) = planned(store, 1)
    crash(store, ref)
    for times in range(3):
        (lone,) = ready(store)
        assert (lone.epoch, lone.isolated) == (times, True)
        assert claim(store, lone).crashes == times
        assert store.suspects.add(lone.id, lone.epoch, "worker", CRASH)
    assert ready(store) == []
    (result,) = store.results.read(job_id)
    assert result.status_code == 500
    assert result.error is not None
    assert result.error.code == "compute_lost"
    assert result.error.message == (
        "computed alone 3 times and never answered; the last time the compute process was ended "
        "by SIGSEGV"
    )
    assert store.jobs.get(job_id).state is JobState.FAILED


def test_deaths_of_workers_are_counted_apart(store: Store) -> None:
    job_id, (ref,) = planned(store, 1)
    crash(store, ref)
    death = Crash("the worker died", CRASH.allowed + 1, of_worker=True)
    kinds = [death] * CRASH.allowed + [CRASH] * (CRASH.allowed - 1)
    for kind in [*kinds, death]:
        (lone,) = ready(store)
        claim(store, lone)
        assert store.suspects.add(lone.id, lone.epoch, "worker", kind)
    assert ready(store) == []
    (result,) = store.results.read(job_id)
    assert result.error is not None
    assert result.error.message == (
        f"computed alone {len(kinds) + 1} times and never answered; the last time the worker died"
    )


def test_one_guilty_request_of_many_is_found_and_the_others_are_answered(store: Store) -> None:
    job_id, _ = planned(store, 24, each=8)
    # 8, 4, 2 in company, then three times alone.
    assert isolate(store, {"row-13"}) == 6
    results = store.results.read(job_id)
    assert codes(results) == ["compute_lost" if n == 13 else None for n in range(24)]
    assert store.jobs.get(job_id).state is JobState.COMPLETED_WITH_FAILURES


def test_a_dead_workers_leases_are_suspects(store: Store) -> None:
    job_id, refs = planned(store, 5, each=2)
    for ref in refs[:2]:
        claim(store, ref, "dead")
    kept = claim(store, refs[2], "alive")
    died = Crash("the worker dead died", allowed=1)
    assert store.suspects.add_owner("dead", died) == 2
    assert store.suspects.add_owner("dead", died) == 0
    suspects = ready(store)
    assert [(ref.size, ref.isolated) for ref in suspects] == [(1, True)] * 4
    claim(store, suspects[0], "dead")
    assert store.suspects.add_owner("dead", died) == 1
    (failure,) = store.results.read(job_id)
    assert failure.error is not None
    assert failure.error.message.endswith(
        "alone once and never answered; the last time the worker dead died"
    )
    assert store.leases.finish(kept.id, 0, "alive", answers(kept))


def test_suspects_come_before_the_backlog_but_not_before_what_is_urgent(store: Store) -> None:
    _, refs = planned(store, 8, each=2)
    _, urgent_refs = planned(store, 2, priority=9)
    _, urgent_suspects = planned(store, 2, each=2, priority=9)
    claim(store, refs[0], "dead")
    claim(store, urgent_suspects[0], "dead")
    died = Crash("the worker dead died", allowed=3)
    assert store.suspects.add_owner("dead", died) == 2
    found = [(ref.urgent, ref.isolated, ref.size) for ref in ready(store)]
    assert found == [
        *[(True, True, 1)] * 2,
        *[(True, False, 1)] * 2,
        *[(False, True, 1)] * 2,
        *[(False, False, 2)] * 3,
    ]
    order = ready(store)
    assert order[2:4] == [replace(ref, urgent=True) for ref in urgent_refs]
    for room in range(1, len(order) + 1):
        assert store.planning.dispatchable(room) == order[:room]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_looking_for_suspects_reads_no_backlog(store: Store) -> None:
    asked = _SUSPECTS.limit(9).params(of_model="")
    literal = asked.compile(store.database.engine, compile_kwargs={"literal_binds": True})
    with store.database.engine.begin() as connection:
        steps = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {literal}").all()
    assert any("ix_micro_batch_suspects (fingerprint" in str(step) for step in steps)


def test_a_lease_that_was_given_back_is_no_suspect(store: Store) -> None:
    _, refs = planned(store, 2)
    for ref in refs:
        claim(store, ref, "leaves")
    assert store.leases.give_back_all("leaves") == 2
    assert store.leases.give_back_all("leaves") == 0
    assert [(ref.epoch, ref.isolated) for ref in ready(store)] == [(1, False)] * 2


def test_a_quiet_run_alone_ends_the_suspicion(store: Store) -> None:
    job_id, (ref,) = planned(store, 1)
    crash(store, ref)
    (lone,) = ready(store)
    crash(store, lone)
    (lone,) = ready(store)
    assert compute(store, lone)
    assert store.jobs.get(job_id).state is JobState.COMPLETED


def test_suspects_of_a_cancelled_job_end_as_cancelled(store: Store) -> None:
    job_id, (ref,) = planned(store, 3, each=3)
    claimed = claim(store, ref)
    store.stopping.cancel(job_id)
    assert store.suspects.add(ref.id, 0, "worker", CRASH, answers(claimed)[:1])
    assert codes(store.results.read(job_id)) == [None, "cancelled", "cancelled"]
    assert store.jobs.get(job_id).state is JobState.CANCELLED
    assert ready(store) == []


def test_under_a_lost_lease_nothing_lands(store: Store) -> None:
    job_id, (ref,) = planned(store, 2, each=2)
    claimed = claim(store, ref, "slow")
    assert store.leases.give_back_all("slow") == 1
    assert not store.suspects.add(ref.id, 0, "slow", CRASH, answers(claimed)[:1])
    assert store.results.read(job_id) == []
    assert [(ref.size, ref.isolated) for ref in ready(store)] == [(2, False)]


def test_a_foreign_answer_is_refused(store: Store) -> None:
    _, (ref, other) = planned(store, 2)
    claim(store, ref)
    with pytest.raises(StoreError, match="no open requests"):
        store.suspects.add(ref.id, 0, "worker", CRASH, answers(claim(store, other)))
    assert store.suspects.add(ref.id, 0, "worker", CRASH)


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_whoever_is_guilty_is_found_and_nobody_else(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, migrated_sqlite_file: object
) -> None:
    count = data.draw(st.integers(1, 12), label="requests")
    each = data.draw(st.integers(1, 6), label="in one micro-batch")
    guilty = data.draw(st.sets(st.integers(0, count - 1)), label="guilty")
    path = tmp_path_factory.mktemp("suspects") / "jobs.db"
    path.write_bytes(migrated_sqlite_file.read_bytes())  # type: ignore[attr-defined]
    store = Store(f"sqlite:///{path}", synchronous="normal")
    try:
        job_id, _ = planned(store, count, each=each)
        isolate(store, {f"row-{n}" for n in guilty})
        found = codes(store.results.read(job_id))
    finally:
        store.close()
    assert found == ["compute_lost" if n in guilty else None for n in range(count)]


def test_a_worker_without_a_heartbeat_loses_its_leases(store: Store) -> None:
    """It died before its first one: its counter is taken as 0."""
    _, refs = planned(store, 2, each=2)
    claim(store, refs[0], "mute")
    (beat,) = store.heartbeats.of_lease_holders()
    died = Crash("the worker mute died", 3, of_worker=True)
    assert store.suspects.add_owner("mute", died, beat.counter) == 1
