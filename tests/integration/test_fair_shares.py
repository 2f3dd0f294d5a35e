"""Tenants share what is computed by their weights, whatever their jobs are like."""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nightjar.jobs.records import NewResult, RequestError
from nightjar.jobs.states import Reuse
from nightjar.jobs.store import Store
from nightjar.jobs.store.share_tables import share
from nightjar.jobs.workers import Crash
from nightjar.pipeline.front.cli.database import shares as show_shares
from nightjar.pipeline.queue.sweeper import Sweeper
from tests.databases import SQLITE_FIRST
from tests.outcomes import answers, claim
from tests.tenants import Machine, Rows, plan_for, set_weight

# Long rows that stop early; short rows; and a flood of small jobs.
LONG = Rows(prompt=150, generated=50, allowed=200, each=3)
SHORT = Rows(prompt=20, generated=5, allowed=5, each=8)
TINY = Rows(prompt=30, generated=10, allowed=10)
ONE = Rows().tokens  # of a micro-batch


def flood(machine: Machine, jobs: int) -> None:
    for _ in range(jobs):
        machine.add("flood", 8, TINY)


@pytest.mark.parametrize("database_url", SQLITE_FIRST, indirect=True)
def test_computed_tokens_follow_the_weights_beside_a_flood(store: Store) -> None:
    set_weight(store, "gold", 3.0)
    machine = Machine(store)
    flood(machine, 34)  # it came first, and each of its jobs has the better rank
    machine.add("gold", 50, LONG)
    machine.add("silver", 50, SHORT)
    landed = machine.run(300)
    assert set(landed) == {"gold", "silver", "flood"}
    fifth = landed.total() / 5
    assert landed["gold"] == pytest.approx(3 * fifth, rel=0.05)
    assert landed["silver"] == pytest.approx(fifth, rel=0.05)
    assert landed["flood"] == pytest.approx(fifth, rel=0.05)


@pytest.mark.parametrize("database_url", SQLITE_FIRST, indirect=True)
def test_what_one_tenant_leaves_goes_to_the_others_and_its_return_gives_its_share(
    store: Store,
) -> None:
    set_weight(store, "gold", 3.0)
    machine = Machine(store, window=4, leases=2)
    machine.add("silver", 120)
    machine.add("gold", 4)
    machine.run(8)
    alone = machine.run(40)  # gold has run dry
    assert set(alone) == {"silver"}
    assert alone.total() == 40 * ONE
    machine.add("gold", 60)
    # Its share at once, and no more for the time that it was away.
    both = Counter[str]()
    for quarters in (4, 8, 12):
        both += machine.run(16)
        assert both["gold"] == pytest.approx(3 * quarters * ONE, abs=2 * ONE), both


def test_a_tenant_that_comes_anew_does_not_take_the_others_turn(store: Store) -> None:
    machine = Machine(store, window=2, leases=1)
    machine.add("old", 60)
    machine.run(30)
    machine.add("new", 60)
    machine.run(2)
    both = machine.run(20)
    assert abs(both["new"] - both["old"]) <= 2 * ONE


@pytest.mark.parametrize("database_url", SQLITE_FIRST, indirect=True)
def test_after_an_idle_time_of_all_nobody_has_credit(store: Store) -> None:
    machine = Machine(store, window=2, leases=1)
    machine.add("busy", 30)
    machine.run(99)
    machine.store.shares.settle()
    machine.add("fresh", 30)
    machine.run(6)
    machine.add("busy", 30)
    machine.run(2)
    both = machine.run(20)
    assert abs(both["fresh"] - both["busy"]) <= 2 * ONE


def test_priorities_count_within_a_tenant(store: Store) -> None:
    calm = plan_for(store, "calm", 3)
    bulk = plan_for(store, "pushy", 3)
    pushed = plan_for(store, "pushy", 3, priority=9)
    found = store.planning.dispatchable(9)
    assert [ref.job_id for ref in found if ref.job_id != calm[0].job_id] == [
        *[pushed[0].job_id] * 3,
        *[bulk[0].job_id] * 3,
    ]
    places = [n for n, ref in enumerate(found) if ref.job_id == calm[0].job_id]
    assert places in ([0, 2, 4], [1, 3, 5])
    assert not any(ref.urgent for ref in found)  # the broker serves urgent ones before all others


def test_urgent_work_is_urgent_again_when_a_tenant_is_alone(store: Store) -> None:
    (other,) = plan_for(store, "calm", 1)
    plan_for(store, "pushy", 2, priority=9)
    assert store.leases.finish(other.id, 0, "worker", answers(claim(store, other)))
    assert [ref.urgent for ref in store.planning.dispatchable(9)] == [True, True]


def test_suspects_of_a_tenant_go_first_in_its_own_share_only(store: Store) -> None:
    bad = plan_for(store, "bad", 4, Rows(each=2))
    good = plan_for(store, "good", 4, Rows(each=2))
    for ref in bad[:2]:
        assert store.suspects.add(ref.id, 0, "worker", Crash("died", 1)) is False  # not leased
        claim(store, ref)
        assert store.suspects.add(ref.id, 0, "worker", Crash("died", 1))
    found = store.planning.dispatchable(12)
    own = [ref for ref in found if ref.job_id == bad[0].job_id]
    assert [ref.isolated for ref in own] == [True] * 4 + [False] * 2
    # Halves cost half: two of them for each of the other tenant's.
    assert [ref.job_id == good[0].job_id for ref in found[:6]].count(True) == 2


def charged(store: Store) -> dict[str, int]:
    store.shares.settle()
    with store.database.reading() as connection:
        rows = connection.execute(sa.select(share.c.tenant, share.c.computed_tokens))
        return dict(rows.all())


def test_only_what_was_computed_and_landed_is_charged_once(store: Store) -> None:
    refs = plan_for(store, "one", 5, Rows(each=2))
    leased = [claim(store, ref) for ref in refs]
    (first, second), owner = leased[0].requests, "worker"
    failed = NewResult(second.id, 500, None, RequestError("compute_failed", "it failed"))
    computed = NewResult(first.id, 200, {}, prompt_tokens=7, completion_tokens=4)
    assert store.leases.finish(leased[0].id, 0, owner, [computed, failed])
    assert not store.leases.finish(leased[0].id, 0, owner, [computed, failed])
    known = [
        NewResult(item.id, 200, {}, prompt_tokens=50, reused=Reuse.CACHE)
        for item in leased[1].requests
    ]
    assert store.leases.finish(leased[1].id, 0, owner, known)
    assert charged(store) == {"one": 11}
    assert charged(store) == {"one": 11}
    assert store.leases.give_back(leased[2].id, 0, owner)
    assert not store.leases.finish(leased[2].id, 0, owner, answers(leased[2]))
    # Of a crash, what had answered; its other half is computed again.
    assert store.suspects.add(leased[3].id, 0, owner, Crash("died", 9), answers(leased[3])[:1])
    assert charged(store) == {"one": 16}
    with store.database.reading() as connection:
        assert connection.scalar(sa.select(share.c.virtual_time)) == 16.0


def test_what_crashes_alone_is_charged_its_plan_each_time(store: Store) -> None:
    """Else a tenant of requests that crash would be the furthest behind for ever."""
    (ref,) = plan_for(store, "bad", 1)
    crash = Crash("died", allowed=2)
    held = claim(store, ref)
    assert store.suspects.add(held.id, 0, "worker", crash)
    assert charged(store) == {}  # something beside it may have been the cause
    (alone,) = store.planning.dispatchable(9)
    for epoch in range(2):
        claim(store, replace(alone, epoch=epoch))
        assert store.suspects.add(alone.id, epoch, "worker", crash)
    assert charged(store) == {"bad": 2 * ONE}


def test_each_sweep_charges_and_the_command_shows_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, weight, micro_batches in (("gold", 2.5, 3), ("silver", 1.0, 1)):
        set_weight(store, name, weight)
        for ref in plan_for(store, name, micro_batches, fingerprint="f" * 64):
            assert store.leases.finish(ref.id, 0, "worker", answers(claim(store, ref)))
    assert store.shares.all() == []
    sweeper = Sweeper(
        store, dead_after_s=9, redispatch_after_s=9, longest_gap_s=9, deaths_allowed=3
    )
    sweeper.sweep(patience_s=0.0)
    url = store.database.engine.url.render_as_string(hide_password=False)
    monkeypatch.setenv(
        "NIGHTJAR_DATABASE_URL", url.replace("+pysqlite", "").replace("+psycopg", "")
    )
    show_shares()
    _, gold, silver = capsys.readouterr().out.splitlines()
    assert gold.split() == ["f" * 12, "gold", "2.5", "15", "75.0%"]
    assert silver.split() == ["f" * 12, "silver", "1", "5", "25.0%"]


def test_shares_are_kept_for_each_model(store: Store) -> None:
    """A token of one model is no token of another, and they mostly have workers of their own."""
    for fingerprint in ("a" * 64, "b" * 64):
        (ref, *_) = plan_for(store, "one", 2, fingerprint=fingerprint)
        if fingerprint.startswith("a"):
            assert store.leases.finish(ref.id, 0, "worker", answers(claim(store, ref)))
        plan_for(store, "two", 2, fingerprint=fingerprint)
    assert charged(store) == {"one": 5}
    # Of model a, the second tenant is behind; of model b, both are equal and the first came first.
    owners = {}
    for ref in store.planning.dispatchable(1):
        owners[ref.fingerprint[0]] = store.jobs.get(ref.job_id).tenant
    assert owners == {"a": "two", "b": "one"}


@pytest.mark.parametrize("weight", [0.0, -1.0, 1e300])
def test_a_weight_without_sense_keeps_nobody_from_being_served(store: Store, weight: float) -> None:
    set_weight(store, "odd", weight)
    machine = Machine(store, window=2, leases=1)
    machine.add("odd", 3)
    machine.add("even", 3)
    assert machine.run(6) == {"odd": 3 * ONE, "even": 3 * ONE}


SIZES = st.sampled_from([Rows(10, 10), Rows(50, 50, 200), Rows(5, 0, 5, each=3)])
ARRIVALS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 12), SIZES, st.integers(0, 10)),
    min_size=2,
    max_size=6,
)


@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(arrivals=ARRIVALS, weights=st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * 3))
def test_whoever_comes_when_nobody_falls_far_behind(
    arrivals: list[tuple[str, int, Rows, int]],
    weights: tuple[float, float, float],
    tmp_path: Path,
    migrated_sqlite_file: Path,
) -> None:
    """While two tenants both wait, their tokens by weight differ by a bound that does not grow."""
    path = shutil.copy(migrated_sqlite_file, tmp_path / "jobs.db")
    store = Store(f"sqlite:///{path}", synchronous="normal")
    window = 3
    try:
        by_weight = dict(zip("abc", weights, strict=True))
        for name, weight in by_weight.items():
            set_weight(store, name, weight)
        machine = Machine(store, window=window, leases=2)
        for name, micro_batches, rows, then in arrivals:
            machine.add(name, micro_batches, rows)
            machine.run(then)
        for name in by_weight:
            machine.add(name, 16, Rows(20, 20, 20))
        # What is in the window, estimated too high at worst, and one more of each.
        most = (window + 2) * 250 / min(weights)
        for _ in range(8):
            landed = machine.run(4, settles_every=1)
            times = {name: landed[name] / by_weight[name] for name in by_weight}
            assert max(times.values()) - min(times.values()) <= most
    finally:
        store.close()
