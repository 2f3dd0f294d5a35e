"""Rankings with documents that earlier jobs have scored: only the other documents are computed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from nightjar.gpu_worker.compute import messages
from nightjar.jobs.records import CachedScore, ClaimedRequest
from nightjar.pipeline.planning.reuse import ResultCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ranking:
    """One ranking, with each document's key and its known score or None."""

    asked: messages.Rank
    keys: Sequence[str]
    known: Sequence[CachedScore | None]

    @property
    def reused_documents(self) -> int:
        """How many documents need not be scored."""
        return sum(score is not None for score in self.known)

    @property
    def rest(self) -> messages.Rank | None:
        """The ranking of the documents without a known score; None if there are none.

        It asks for the best `top_n`: the best of all documents are among these and the known ones.
        """
        unknown = self._unknown
        if not unknown:
            return None
        asked = self.asked.request
        left = replace(
            asked,
            documents=[asked.documents[index] for index in unknown],
            top_n=None if asked.top_n is None else min(asked.top_n, len(unknown)),
        )
        return messages.Rank(left)

    def whole(self, rest: messages.Ranked | None) -> messages.Ranked:
        """Return the answer to all documents, from the answer to the rest."""
        mean_nll = [None if score is None else score.mean_nll for score in self.known]
        counts = [0 if score is None else score.token_count for score in self.known]
        if rest is None:
            return messages.Ranked(self.asked.ticket, mean_nll, counts)
        for index, nll, count in zip(self._unknown, rest.mean_nll, rest.token_counts, strict=True):
            mean_nll[index], counts[index] = nll, count
        return msgspec.structs.replace(rest, mean_nll=mean_nll, token_counts=counts)

    def computed(self, rest: messages.Ranked) -> list[CachedScore]:
        """Return the scores to keep; none of an answer that took a higher precision."""
        if rest.recomputed_in is not None:
            return []
        scored = zip(self._unknown, rest.mean_nll, rest.token_counts, strict=True)
        return [
            CachedScore(self.keys[index], nll, count)
            for index, nll, count in scored
            if nll is not None
        ]

    @property
    def _unknown(self) -> list[int]:
        return [index for index, score in enumerate(self.known) if score is None]


def rankings(
    asked: Sequence[tuple[ClaimedRequest, messages.Generate | messages.Rank]],
    cache: ResultCache,
    precision: str,
) -> dict[int, Ranking]:
    """Return the known scores of each ranking among the requests, by the request's id.

    A ranking for which the cache raises is left out.
    """
    ranked = {r.id: (r, message) for r, message in asked if isinstance(message, messages.Rank)}
    keys = {id_: _keys(request, cache, precision) for id_, (request, _) in ranked.items()}
    found = cache.find_scores([key for of_one in keys.values() for key in of_one])
    return {
        id_: Ranking(ranked[id_][1], of_one, [found.get(key) for key in of_one])
        for id_, of_one in keys.items()
        if of_one
    }


def _keys(request: ClaimedRequest, cache: ResultCache, precision: str) -> list[str]:
    """Return a score or None for each document; where the cache raises, nothing is known."""
    try:
        return cache.score_keys(request, precision)
    except Exception:  # an error of the cache must not fail this request or others
        logger.exception(
            "the scores of request %d are not looked up",
            request.id,
            extra={"action": "scores_not_looked_up", "request": request.id},
        )
        return []
