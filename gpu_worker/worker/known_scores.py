"""Rankings of which earlier jobs have scored some documents: what is left to ask of them."""

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
    """One ranking and what is known of it: a key for each document, a score or none."""

    asked: messages.Rank
    keys: Sequence[str]
    known: Sequence[CachedScore | None]

    @property
    def reused_documents(self) -> int:
        """How many need not be scored."""
        return sum(score is not None for score in self.known)

    @property
    def rest(self) -> messages.Rank | None:
        """The ranking of the other documents; None if there are none.

        The best `top_n` of all are among the best of these and those that are known.
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
        """The answer to all, from that to the rest."""
        mean_nll = [None if score is None else score.mean_nll for score in self.known]
        counts = [0 if score is None else score.token_count for score in self.known]
        if rest is None:
            return messages.Ranked(self.asked.ticket, mean_nll, counts)
        for index, nll, count in zip(self._unknown, rest.mean_nll, rest.token_counts, strict=True):
            mean_nll[index], counts[index] = nll, count
        return msgspec.structs.replace(rest, mean_nll=mean_nll, token_counts=counts)

    def computed(self, rest: messages.Ranked) -> list[CachedScore]:
        """What an answer to the rest has to be kept of; nothing that took a higher precision."""
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
    """What is known of each ranking among the requests, by the request's id.

    One whose documents cannot be looked up is left out.
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
    """One for each document; none if they cannot be told, then all of them are computed."""
    try:
        return cache.score_keys(request, precision)
    except Exception:  # reuse is worth no request, and none of its neighbours
        logger.exception(
            "the scores of request %d are not looked up",
            request.id,
            extra={"action": "scores_not_looked_up", "request": request.id},
        )
        return []
