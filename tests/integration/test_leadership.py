"""Who leads: one at a time, judged by each observer's own monotonic clock."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from nightjar.jobs.store import Store
from nightjar.jobs.store.tables import leader
from nightjar.jobs.workers import ComputeSeconds, Crash, Leader
from nightjar.pipeline.queue.leadership import PLANNER, PROTOCOL, Leadership
from nightjar.pipeline.queue.sweeper import Sweeper, SweepReport
from tests.clock import Clock
from tests.jobs import planned
from tests.outcomes import answers, claim

CRASH = Crash("the worker died", allowed=3)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def planner(store: Store, name: str, clock: Clock) -> Leadership:
    return Leadership(store.leaders, name, dead_after_s=10, longest_gap_s=4, clock=clock)


def watch(one: Leadership, clock: Clock, seconds: float) -> bool:
    """Look every two seconds; whether it leads in the end."""
    leads = False
    while seconds > 0:
        clock.now += min(2, seconds)
        seconds -= 2
        leads = one.check()
    return leads


def test_the_first_leads_and_the_second_stands_by(store: Store, clock: Clock) -> None:
    ann, bob = (planner(store, name, clock) for name in ("ann", "bob"))
    assert ann.check()
    assert not bob.check()
    assert ann.check()
    assert not bob.check()
    assert (ann.other_lives, bob.other_lives) == (False, True)
    assert store.leaders.get(PLANNER) == Leader(PLANNER, "ann", 1, 1, PROTOCOL)


def test_a_leader_that_lives_is_never_replaced(store: Store, clock: Clock) -> None:
    ann, bob = (planner(store, name, clock) for name in ("ann", "bob"))
    ann.check()
    for _ in range(30):
        assert not watch(bob, clock, 8)
        assert ann.check()


def take_like_the_version_before(store: Store, owner: str) -> None:
    """Its statement: it knows no protocol, and leaves what a newer planner wrote."""
    taken = sa.update(leader).where(leader.c.name == PLANNER)
    values = {"owner": owner, "epoch": leader.c.epoch + 1, "counter": 0}
    store.database.write(lambda connection: connection.execute(taken.values(values)))


def test_a_newer_planner_takes_the_lead_from_an_older_one(store: Store, clock: Clock) -> None:
    ann = planner(store, "ann", clock)
    assert ann.check()
    take_like_the_version_before(store, "old")
    old = store.leaders.get(PLANNER)
    assert old == Leader(PLANNER, "old", 2, 0, 0)
    assert store.leaders.renew(old)
    assert ann.check()  # it lost the lead, and takes it back although the other one lives
    assert store.leaders.get(PLANNER) == Leader(PLANNER, "ann", 3, 0, PROTOCOL)
    assert not store.leaders.renew(old)
    newer, equal = (
        Leadership(
            store.leaders, name, dead_after_s=10, longest_gap_s=4, clock=clock, protocol=number
        )
        for name, number in (("newer", PROTOCOL + 1), ("equal", PROTOCOL))
    )
    assert [equal.check(), newer.check(), ann.check(), newer.check()] == [False, True, False, True]


def test_a_silent_leader_is_replaced_and_learns_of_it(store: Store, clock: Clock) -> None:
    ann, bob = (planner(store, name, clock) for name in ("ann", "bob"))
    assert ann.check()
    assert not bob.check()
    assert not watch(bob, clock, 9.9)
    assert watch(bob, clock, 0.1)
    assert store.leaders.get(PLANNER) == Leader(PLANNER, "bob", 2, 0, PROTOCOL)
    assert not ann.check()
    assert bob.check()
    assert not ann.check()
    assert (ann.other_lives, bob.other_lives) == (True, False)


def test_a_leader_that_was_never_seen_to_move_stops_nobody(store: Store, clock: Clock) -> None:
    """Left by a planner that was killed: plans and dispatches need not wait for the proof."""
    planner(store, "killed", clock).check()
    fresh = planner(store, "fresh", clock)
    assert not fresh.check()
    assert not fresh.other_lives
    assert watch(fresh, clock, 10)


def test_time_in_which_nobody_looked_is_no_silence(store: Store, clock: Clock) -> None:
    planner(store, "ann", clock).check()
    bob = planner(store, "bob", clock)
    assert not bob.check()
    clock.now += 3_600
    assert not bob.check()
    assert not watch(bob, clock, 5.9)
    assert watch(bob, clock, 0.1)


def test_who_resigns_is_replaced_at_once(store: Store, clock: Clock) -> None:
    ann, bob = (planner(store, name, clock) for name in ("ann", "bob"))
    ann.check()
    bob.check()
    ann.resign()
    assert not ann.other_lives  # it has seen none
    assert bob.check()
    ann.resign()
    assert bob.check()
    assert store.leaders.get(PLANNER) == Leader(PLANNER, "bob", 2, 1, PROTOCOL)


def test_who_comes_too_late_for_a_dead_leader_knows_of_none_that_lives(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another takes the lead after this process has judged and before it takes."""
    ann, bob = (planner(store, name, clock) for name in ("ann", "bob"))
    for _ in range(2):
        assert ann.check()
        assert not bob.check()
    assert bob.other_lives
    assert not watch(bob, clock, 9.9)
    read = store.leaders.get

    def overtaken(name: str) -> Leader | None:
        seen = read(name)
        assert store.leaders.take(name, "carol", seen, PROTOCOL) is not None
        return seen

    with monkeypatch.context() as patched:
        patched.setattr(store.leaders, "get", overtaken)
        assert not watch(bob, clock, 0.1)
    assert not bob.other_lives
    assert store.leaders.get(PLANNER) == Leader(PLANNER, "carol", 2, 0, PROTOCOL)
    assert not bob.check()
    assert bob.other_lives


def test_who_may_plan_and_dispatch(store: Store, clock: Clock) -> None:
    ann, bob = (planner(store, name, clock) for name in ("ann", "bob"))
    assert not ann.may_act()  # another may lead that has not moved yet
    assert ann.check()
    assert ann.may_act()
    watch(bob, clock, 3.9)
    assert not bob.may_act()
    watch(bob, clock, 0.1)
    assert bob.may_act()  # who leads has not moved, and may be dead
    ann.check()
    bob.check()
    assert not bob.may_act()
    assert watch(bob, clock, 10)
    assert bob.may_act()
    assert not ann.may_act()  # it has not looked since


def test_many_that_take_at_once(store: Store, clock: Clock) -> None:
    planner(store, "dead", clock).check()
    others = [planner(store, f"p{n}", clock) for n in range(6)]
    assert not any(other.check() for other in others)
    for _ in range(4):
        clock.now += 2
        assert not any(other.check() for other in others)
    clock.now += 2
    with ThreadPoolExecutor(6) as pool:
        leads = list(pool.map(Leadership.check, others))
    assert sum(leads) == 1
    held = store.leaders.get(PLANNER)
    assert held is not None
    assert (held.owner, held.epoch) == (f"p{leads.index(True)}", 2)


def test_a_worker_that_has_moved_since_it_was_judged_keeps_its_leases(store: Store) -> None:
    """Two sweepers at once: the second acts on what it had read before the first did."""
    _, (first, second) = planned(store, 2)
    store.heartbeats.beat("worker", ComputeSeconds())
    claim(store, first)
    assert store.suspects.add_owner("worker", CRASH, counter=1) == 1
    store.heartbeats.beat("worker", ComputeSeconds())  # it was only slow
    claimed = claim(store, second)
    assert store.suspects.add_owner("worker", CRASH, counter=1) == 0
    assert store.leases.finish(second.id, 0, "worker", answers(claimed))


def sweeper(store: Store, clock: Clock) -> Sweeper:
    return Sweeper(
        store,
        dead_after_s=10,
        redispatch_after_s=60,
        longest_gap_s=4,
        deaths_allowed=3,
        clock=clock,
    )


def test_who_stood_by_knows_who_has_been_silent(store: Store, clock: Clock) -> None:
    _, (held, lost) = planned(store, 2)
    standing_by = sweeper(store, clock)
    claim(store, held, "silent")
    store.planning.mark_dispatched([lost])
    for _ in range(31):
        standing_by.watch()
        clock.now += 2
    assert [ref.id for ref in store.leases.held_by("silent")] == [held.id]
    assert standing_by.sweep() == SweepReport(released=1, requeued=1)


def test_a_leader_that_renews_between_look_and_take_keeps_the_lead(store: Store) -> None:
    seen = store.leaders.take("planner", "ann", None)
    assert seen is not None
    assert store.leaders.renew(seen)
    assert store.leaders.take("planner", "bob", seen) is None
    current = store.leaders.get("planner")
    assert current is not None
    assert (current.owner, current.counter) == ("ann", 1)
    taken = store.leaders.take("planner", "bob", current)
    assert taken is not None
    assert (taken.owner, taken.epoch) == ("bob", 2)
    assert not store.leaders.renew(seen)


def test_a_reading_of_the_lead_is_trusted_for_a_moment_only(store: Store, clock: Clock) -> None:
    ann = Leadership(
        store.leaders, "ann", dead_after_s=10, longest_gap_s=4, trusted_s=0.1, clock=clock
    )
    bob = planner(store, "bob", clock)
    assert ann.check()
    assert ann.may_act()
    bob.check()
    taken = store.leaders.take(PLANNER, "bob", store.leaders.get(PLANNER))
    assert taken is not None
    clock.now += 0.09
    assert ann.may_act()
    clock.now += 0.02
    assert not ann.may_act()
