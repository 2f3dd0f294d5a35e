"""Handles micro-batches that were planned for models that are not served any more.

Micro-batches hold token ids of one model's tokenizer: no worker of another model may claim them.
`replan`: micro-batches that no worker computes are taken apart. Their requests are queued again,
and planned for the model that they or their job name. `finish`: they stay on their queues for the
workers of their model. Micro-batches of an earlier version name no model, and are always planned
again.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable

from nightjar.jobs.records import MicroBatchRef
from nightjar.jobs.store.replanning import Replanning
from nightjar.pipeline.queue.queues import short_model
from nightjar.pipeline.settings.models import OnModelChange

logger = logging.getLogger(__name__)

MICRO_BATCHES_PER_STEP = 16
"""Micro-batches of one transaction: some 2,000 requests."""
BUDGET_S = 0.5
SAY_EVERY_S = 60.0


class ModelChange:
    """Takes micro-batches of other models apart; called with every sweep of the leader.

    Args:
        replanning: Takes micro-batches apart in the store.
        served: Fingerprints of the served models.
        policy: What to do with micro-batches of other models.
        empty_queues: Drops the messages of a model, by its fingerprint.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        replanning: Replanning,
        served: Collection[str],
        policy: OnModelChange,
        empty_queues: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replanning = replanning
        self._served = frozenset(served)
        self._unnamed_alone = policy == "finish"
        self._empty_queues = empty_queues
        self._clock = clock
        self._retired: set[str] = set()
        self._say_again: dict[str, float] = {}  # by fingerprint: when to warn again

    def take_apart(self) -> int:
        """Take micro-batches apart for half a second; return how many requests they held."""
        requests = 0
        until = self._clock() + BUDGET_S
        while taken := self._replanning.take_apart_others(
            self._served, MICRO_BATCHES_PER_STEP, unnamed_alone=self._unnamed_alone
        ):
            requests += sum(ref.size for ref in taken)
            self._retired |= {ref.fingerprint for ref in taken}
            if self._clock() > until:
                break
        else:
            # Their messages would find nothing to claim, and may have no worker to take them.
            while self._retired:
                self._empty_queues(self._retired.pop())
        if requests:
            logger.warning(
                "%d requests were planned for another model than %s: they are planned again",
                requests,
                " and ".join(map(short_model, sorted(self._served))),
                extra={"action": "replan", "requests": requests},
            )
        return requests

    def warn_of_waiting(self, overdue: Iterable[MicroBatchRef]) -> None:
        """Warn, once a minute, of models whose micro-batches no worker has claimed for long."""
        for fingerprint in {ref.fingerprint for ref in overdue} - self._served:
            if self._clock() < self._say_again.get(fingerprint, -math.inf):
                continue
            self._say_again[fingerprint] = self._clock() + SAY_EVERY_S
            logger.warning(
                "micro-batches wait for a worker of the model %s; start one, or set "
                "NIGHTJAR_ON_MODEL_CHANGE=replan",
                short_model(fingerprint),
                extra={"action": "model_without_worker", "model": short_model(fingerprint)},
            )
