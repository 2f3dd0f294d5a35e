"""The costs of loading a prefix and of computing it, measured by the engine while it runs."""

from __future__ import annotations

from collections import deque
from statistics import median_low

from nightjar.checkpoints import ModelConfig
from nightjar.gpu_worker.engine.plan import StepPlan

MEASURES = 9
"""The median of so many latest measurements counts; an odd number.

A mean would be wrong for long: the first step of a kind compiles kernels.
"""

FEWEST_ROWS = 64
"""Prompt rows of a timed step: a smaller step costs a pass over the weights, whatever its rows."""

START_S = 20e-6
"""Seconds to launch the transfer of one layer.  Small loads do not pay because of it."""

OPERATIONS_S = {"cpu": 50e9, "cuda": 200e12}
"""Operations a second, until prompts were timed."""

BYTES_S = {"cpu": 2e9, "cuda": 20e9}
"""Bytes a second between cache and host memory, until transfers were timed."""


class Recent:
    """The median of the latest measurements; of two, the lower one."""

    def __init__(self, start: float) -> None:
        self._found = deque([start], MEASURES)

    def add(self, value: float) -> None:
        """Add a measurement; the oldest is dropped."""
        self._found.append(value)

    @property
    def value(self) -> float:
        """The expected value."""
        return median_low(self._found)


class LoadCosts:
    """Chooses between loading and computing.

    Transfers in both directions are timed.  So a bad measurement is corrected soon, even where
    nothing is loaded because of it.
    """

    def __init__(self, token_s: float, byte_s: float, start_s: float) -> None:
        """token_s, byte_s: first guesses of the seconds to compute a prompt's token and to move a
        byte; start_s: seconds of a transfer, whatever its size."""
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
        """Estimate from a model's size, 12 H^2 weights a layer, and what such devices can do."""
        kind = device.partition(":")[0]
        operations = 24.0 * config.n_layers * config.hidden_size**2
        start_s = START_S * config.n_layers
        return LoadCosts(operations / OPERATIONS_S[kind], 1 / BYTES_S[kind], start_s)

    def loading_pays(self, tokens: int, bytes_: int, queued_bytes: int) -> bool:
        """Whether loading these tokens, after queued transfers, is faster than computing them."""
        load_s = self.start_s + (queued_bytes + bytes_) * self.byte_s
        return load_s < tokens * self.token_s

    def moved(self, bytes_: int, seconds: float) -> None:
        """Take the time of a transfer."""
        self._byte_costs.add(seconds / bytes_)

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """Take the time of a step.

        The host does not wait for a step that predicts nothing: its time counts with the next one.
        A step with few prompt rows, or with loaded blocks, does not tell the cost of prompts.
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
    """Return how many rows of prompts and queries the plan has."""
    return sum(chunk.end - chunk.start for chunk in plan.chunks)
