"""What becomes of work that was planned for another model than the one that is served now.

Micro-batches hold token ids of one model's tokenizer: no worker of another model may claim them.
`replan`: what nobody computes is taken apart, and its requests are planned for the model that is
served now. `finish`: it stays on its queues for the workers of its own model. What a version before
this one has planned names no model, and is always planned anew.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable

from nightjar.jobs.records import MicroBatchRef
from nightjar.jobs.store.replanning import Replanning
from nightjar.pipeline.queue.queues import short_model
from nightjar.pipeline.settings import OnModelChange

logger = logging.getLogger(__name__)

MICRO_BATCHES_PER_STEP = 16
"""In one transaction: some 2,000 requests."""
BUDGET_S = 0.5
SAY_EVERY_S = 60.0


class ModelChange:
    """Looks for work of other models; called with every sweep of the planner that leads.

    Args:
        replanning: Takes the work of other models apart.
        served: Fingerprint of the model that is planned for now.
        policy: What becomes of the others' work.
        empty_queues: Drops the messages of a model, by its fingerprint.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        replanning: Replanning,
        served: str,
        policy: OnModelChange,
        empty_queues: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replanning = replanning
        self._served = served
        self._unnamed_alone = policy == "finish"
        self._empty_queues = empty_queues
        self._clock = clock
        self._retired: set[str] = set()
        self._say_again: dict[str, float] = {}  # by fingerprint: not before

    def take_apart(self) -> int:
        """Take apart what is to be planned anew, for half a second; returns how many requests."""
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
            # Their messages would find nothing to claim, and may have nobody to take them.
            while self._retired:
                self._empty_queues(self._retired.pop())
        if requests:
            logger.warning(
                "%d requests were planned for another model than %s: they are planned anew",
                requests,
                short_model(self._served),
                extra={"action": "replan", "requests": requests},
            )
        return requests

    def warn_of_waiting(self, overdue: Iterable[MicroBatchRef]) -> None:
        """Say, now and then, which models' micro-batches nobody has claimed for long."""
        for fingerprint in {ref.fingerprint for ref in overdue} - {self._served}:
            if self._clock() < self._say_again.get(fingerprint, -math.inf):
                continue
            self._say_again[fingerprint] = self._clock() + SAY_EVERY_S
            logger.warning(
                "micro-batches wait for a worker of the model %s; start one, or set "
                "NIGHTJAR_ON_MODEL_CHANGE=replan",
                short_model(fingerprint),
                extra={"action": "model_without_worker", "model": short_model(fingerprint)},
            )
