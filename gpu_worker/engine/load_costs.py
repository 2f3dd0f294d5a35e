"""What loading a prefix costs, and what computing it: measured by the engine as it goes."""

from __future__ import annotations

from collections import deque
from statistics import median_low

from nightjar.checkpoints import ModelConfig
from nightjar.gpu_worker.engine.plan import StepPlan

MEASURES = 9
"""As many of the latest measurements count, by their median: the first step of a kind compiles
kernels, and a mean would remember that for long.  An odd number."""

FEWEST_ROWS = 64
"""Of a step that is timed: a smaller one costs a pass over the weights, whatever its rows."""

START_S = 20e-6
"""Of the transfer of one layer, whatever its size: a launch.  It keeps small loads from paying."""

OPERATIONS_S = {"cpu": 50e9, "cuda": 200e12}
"""Of products, until prompts were timed."""

BYTES_S = {"cpu": 2e9, "cuda": 20e9}
"""Between the cache and the host's memory, until transfers were timed."""


class Recent:
    """The median of the latest measurements; of two, the lower one."""

    def __init__(self, start: float) -> None:
        self._found = deque([start], MEASURES)

    def add(self, value: float) -> None:
        """One more measurement; the oldest is forgotten."""
        self._found.append(value)

    @property
    def value(self) -> float:
        """What is expected now."""
        return median_low(self._found)


class LoadCosts:
    """Chooses between loading and computing.

    Transfers in both directions are timed, so that the bus is known again soon after a bad
    measurement, even where nothing is loaded any more because of it.
    """

    def __init__(self, token_s: float, byte_s: float, start_s: float) -> None:
        """Seconds, to begin with, of computing a token of a prompt and of moving a byte; start_s:
        of a transfer, whatever its size."""
        self._token_costs = Recent(token_s)
        self._byte_costs = Recent(byte_s)
        self.start_s = start_s
        self._rows = 0
        self._seconds = 0.0

    @property
    def token_s(self) -> float:
        """The seconds that computing one token of a prompt is expected to take."""
        return self._token_costs.value

    @property
    def byte_s(self) -> float:
        """The seconds that moving one byte is expected to take."""
        return self._byte_costs.value

    @staticmethod
    def estimated(config: ModelConfig, device: str) -> LoadCosts:
        """From a model's size, 12 H^2 weights a layer, and what devices of the kind can do."""
        kind = device.partition(":")[0]
        operations = 24.0 * config.n_layers * config.hidden_size**2
        start_s = START_S * config.n_layers
        return LoadCosts(operations / OPERATIONS_S[kind], 1 / BYTES_S[kind], start_s)

    def loading_pays(self, tokens: int, bytes_: int, queued_bytes: int) -> bool:
        """Whether these tokens are there sooner if they are loaded, behind what is queued."""
        load_s = self.start_s + (queued_bytes + bytes_) * self.byte_s
        return load_s < tokens * self.token_s

    def moved(self, bytes_: int, seconds: float) -> None:
        """A transfer was timed."""
        self._byte_costs.add(seconds / bytes_)

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """A step was timed.

        One that nothing is predicted in is not waited for by the host: it counts with the next.
        Those with few rows of prompts, or with blocks that were loaded, say nothing of prompts.
        """
        if plan.arrivals is not None:
            self._rows, self._seconds = 0, 0.0
            return
        self._rows += _prompt_rows(plan)
        self._seconds += seconds
        if not (plan.sampled or plan.branches):
            return
        others = len(plan.decodes) + sum(branch.depth for branch in plan.branches)
        if self._rows >= max(FEWEST_ROWS, 4 * others):
            self._token_costs.add(self._seconds / self._rows)
        self._rows, self._seconds = 0, 0.0


def _prompt_rows(plan: StepPlan) -> int:
    """Rows of prompts and queries."""
    return sum(chunk.end - chunk.start for chunk in plan.chunks)
