"""Kept answers: found by their keys, bounded by number and age."""

import time

import pytest

from nightjar.jobs.records import (
    CachedAnswer,
    CachedScore,
    EncodedRequest,
    NewMicroBatch,
    NewResult,
)
from nightjar.jobs.states import JobState, RequestKind, Reuse
from nightjar.jobs.store import Store
from nightjar.jobs.store.result_cache import MOST_BODY_CHARACTERS
from tests.jobs import submit
from tests.outcomes import codes

pytestmark = pytest.mark.one_database

LONG_S = 3_600.0


def answer(key: str, text: str = "a") -> CachedAnswer:
    return CachedAnswer(key, {"text": text}, 3, 2, 4, 2, "stop")


def keys(store: Store, *asked: str) -> list[str]:
    return sorted(store.cache.find_answers(asked, LONG_S))


def test_what_is_kept_is_found(store: Store) -> None:
    assert store.cache.find_answers(["k"], LONG_S) == {}
    assert store.cache.keep_answers([answer("k"), answer("l", "안녕")]) == 2
    assert store.cache.find_answers(["k", "l", "m"], LONG_S) == {
        "k": answer("k"),
        "l": answer("l", "안녕"),
    }
    assert store.cache.find_answers([], LONG_S) == {}


def test_the_first_answer_of_a_key_stays(store: Store) -> None:
    assert store.cache.keep_answers([answer("k", "first"), answer("k", "second")]) == 1
    assert store.cache.keep_answers([answer("k", "third")]) == 0
    assert store.cache.find_answers(["k"], LONG_S)["k"].body == {"text": "first"}


def test_the_oldest_leave(store: Store) -> None:
    names = [f"k{n}" for n in range(5)]
    for name in names:
        store.cache.keep_answers([answer(name)])
    assert store.cache.drop_old(most_answers=3, most_scores=1, oldest_s=LONG_S) == 2
    assert keys(store, *names) == ["k2", "k3", "k4"]
    assert store.cache.drop_old(most_answers=3, most_scores=1, oldest_s=LONG_S) == 0


def test_what_is_too_old_is_neither_found_nor_kept(store: Store) -> None:
    store.cache.keep_answers([answer("old")])
    time.sleep(0.05)
    assert store.cache.find_answers(["old"], youngest_s=0.05) == {}
    store.cache.keep_answers([answer("new")])
    assert store.cache.drop_old(most_answers=9, most_scores=9, oldest_s=0.05) == 1
    assert keys(store, "old", "new") == ["new"]


def test_many_leave_in_steps(store: Store) -> None:
    store.cache.keep_answers([answer(f"{n:04}") for n in range(2_500)])
    assert store.cache.drop_old(most_answers=10, most_scores=1, oldest_s=LONG_S) == 2_490
    assert len(store.cache.find_answers([f"{n:04}" for n in range(2_500)], LONG_S)) == 10


def test_an_answer_that_would_push_out_many_is_not_kept(store: Store) -> None:
    assert (
        store.cache.keep_answers([answer("huge", "x" * MOST_BODY_CHARACTERS), answer("small")]) == 1
    )
    assert keys(store, "huge", "small") == ["small"]


def score(key: str, mean_nll: float = 1.25) -> CachedScore:
    return CachedScore(key, mean_nll, 3)


def test_scores_are_kept_beside_the_answers_with_their_bits(store: Store) -> None:
    exact = 1.0 / 3.0
    store.cache.keep_answers([answer("k")])
    assert store.cache.keep_scores([score("k", exact), score("l")]) == 2
    assert store.cache.keep_scores([score("k", 9.0)]) == 0
    found = store.cache.find_scores(["k", "l", "m"], LONG_S)
    assert found == {"k": score("k", exact), "l": score("l")}
    assert store.cache.find_scores([], LONG_S) == {}


def test_the_oldest_scores_leave_and_the_answers_stay(store: Store) -> None:
    store.cache.keep_answers([answer("k")])
    names = [f"k{n}" for n in range(5)]
    for name in names:
        store.cache.keep_scores([score(name)])
    assert store.cache.drop_old(most_answers=1, most_scores=2, oldest_s=LONG_S) == 3
    assert sorted(store.cache.find_scores(names, LONG_S)) == ["k3", "k4"]
    assert keys(store, "k") == ["k"]
    time.sleep(0.05)
    assert store.cache.find_scores(names, youngest_s=0.05) == {}


def known(request_id: int) -> NewResult:
    body = {"id": "cmpl-999", "text": "kept", "usage": {"prompt_tokens": 3}}
    return NewResult(request_id, 200, body, None, 3, 2, 4, 2, "stop", Reuse.CACHE)


def test_a_plan_lands_answers_that_are_known(store: Store) -> None:
    job_id = submit(store, [{"prompt": f"p{n}"} for n in range(3)])
    first, second, third = [item.id for item in store.backlog.queued_requests(job_id, 9)]
    refs = store.planning.save_plan(
        job_id,
        [EncodedRequest(second, [[1]])],
        [NewMicroBatch(RequestKind.GENERATE, 32, [second], 1)],
        answered=[known(first), known(third)],
    )
    assert len(refs) == 1
    found = store.jobs.get(job_id)
    assert (found.state, found.completed, found.reused, found.reused_tokens) == (
        JobState.RUNNING,
        2,
        2,
        10,
    )
    assert [item.body for item in store.results.read(job_id)] == [
        {"id": f"cmpl-{id_}", "text": "kept", "usage": {"prompt_tokens": 3}, "reused": "cache"}
        for id_ in (first, third)
    ]


def test_a_job_of_known_answers_alone_is_over_when_it_is_planned(store: Store) -> None:
    job_id = submit(store, [{"prompt": "a"}])
    (only,) = store.backlog.queued_requests(job_id, 9)
    store.planning.save_plan(job_id, [], [], answered=[known(only.id)])
    assert store.jobs.get(job_id).state is JobState.COMPLETED
    # Another planner had the same thought.
    store.planning.save_plan(job_id, [], [], answered=[known(only.id)])
    assert codes(store.results.read(job_id)) == [None]
    assert store.jobs.get(job_id).completed == 1


def test_followers_of_a_known_answer_land_with_it(store: Store) -> None:
    job_id = submit(store, [{"prompt": "a", "temperature": 0}] * 3, merge_equal=True)
    (leader,) = store.backlog.queued_requests(job_id, 9)
    store.planning.save_plan(job_id, [], [], answered=[known(leader.id)])
    found = store.jobs.get(job_id)
    assert (found.state, found.completed, found.reused) == (JobState.COMPLETED, 3, 3)
    bodies = [item.body or {} for item in store.results.read(job_id)]
    assert [body["reused"] for body in bodies] == ["cache"] * 3
    assert len({body["id"] for body in bodies}) == 3


def test_known_answers_of_a_stopped_job_are_left(store: Store) -> None:
    job_id = submit(store, [{"prompt": "a"}])
    (only,) = store.backlog.queued_requests(job_id, 9)
    store.stopping.cancel(job_id)
    store.planning.save_plan(job_id, [], [], answered=[known(only.id)])
    assert codes(store.results.read(job_id)) == ["cancelled"]
