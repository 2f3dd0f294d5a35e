"""What is left to ask of a ranking, and its whole answer."""

from collections.abc import Sequence
from typing import cast

import pytest

from nightjar.gpu_worker.compute.messages import Rank, Ranked
from nightjar.gpu_worker.worker.known_scores import Ranking, rankings
from nightjar.jobs.records import CachedScore, ClaimedRequest
from nightjar.jobs.states import RequestKind
from nightjar.pipeline.planning.reuse import ResultCache
from nightjar.requests import RankRequest

DOCUMENTS = [[1], [2, 2], [3], [4]]
KEYS = ["a", "b", "c", "d"]


def ranking(known: dict[str, float], top_n: int | None = None) -> Ranking:
    scores = [CachedScore(key, known[key], 7) if key in known else None for key in KEYS]
    return Ranking(Rank(RankRequest(5, [9], DOCUMENTS, "v@1", top_n)), KEYS, scores)


def test_only_what_is_not_known_is_asked_and_stands_in_its_place_again() -> None:
    partly = ranking({"b": 0.5, "c": 1.5})
    assert partly.rest == Rank(RankRequest(5, [9], [[1], [4]], "v@1", None))
    assert partly.reused_documents == 2
    whole = partly.whole(Ranked(5, [2.0, 3.0], [1, 1]))
    assert whole == Ranked(5, [2.0, 0.5, 1.5, 3.0], [1, 7, 7, 1])


def test_a_ranking_that_is_not_known_is_asked_as_it_is() -> None:
    new = ranking({})
    assert new.rest == new.asked
    answer = Ranked(5, [1.0, 2.0, None, 4.0], [1, 2, 1, 1])
    assert new.whole(answer) == answer
    assert new.computed(answer) == [
        CachedScore("a", 1.0, 1),
        CachedScore("b", 2.0, 2),
        CachedScore("d", 4.0, 1),
    ]


def test_a_ranking_of_which_all_is_known_is_not_asked() -> None:
    known = ranking(dict.fromkeys(KEYS, 1.0))
    assert known.rest is None
    assert known.whole(None) == Ranked(5, [1.0] * 4, [7] * 4)


@pytest.mark.parametrize(("top_n", "asked"), [(None, None), (1, 1), (2, 2), (3, 2), (4, 2)])
def test_no_more_of_the_best_are_asked_than_are_left(top_n: int | None, asked: int | None) -> None:
    rest = ranking({"a": 1.0, "d": 2.0}, top_n).rest
    assert rest is not None
    assert rest.request.top_n == asked


def test_scores_of_a_higher_precision_are_not_kept() -> None:
    answer = Ranked(5, [1.0, 2.0, 3.0, 4.0], [1, 2, 1, 1], recomputed_in="fp64")
    assert ranking({}).computed(answer) == []
    assert ranking({"a": 1.0}).whole(Ranked(5, [2.0] * 3, [1] * 3, "fp64")).recomputed_in == "fp64"


class OddCache:
    """Knows document "b" of every ranking; cannot look up those of request 2."""

    def score_keys(self, request: ClaimedRequest, precision: str) -> list[str]:
        if request.id == 2:
            raise ValueError("not to be looked up")
        return [f"{request.id}{key}" for key in KEYS]

    def find_scores(self, keys: Sequence[str]) -> dict[str, CachedScore]:
        return {key: CachedScore(key, 0.5, 7) for key in keys if key.endswith("b")}


def test_a_ranking_that_cannot_be_looked_up_is_computed_whole_and_its_neighbours_are_not() -> None:
    def claimed(id_: int) -> tuple[ClaimedRequest, Rank]:
        asked = Rank(RankRequest(id_, [9], DOCUMENTS))
        return ClaimedRequest(id_, id_, "", RequestKind.RANK, {}, [[9], *DOCUMENTS]), asked

    known = rankings([claimed(1), claimed(2), claimed(3)], cast("ResultCache", OddCache()), "fp32")
    assert {id_: ranking.reused_documents for id_, ranking in known.items()} == {1: 1, 3: 1}
    left = [Rank(RankRequest(id_, [9], [[1], [3], [4]])) for id_ in (1, 3)]
    assert [known[id_].rest for id_ in (1, 3)] == left
