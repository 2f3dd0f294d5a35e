"""The figure of a step with prompts: how long the device waits for the host in it."""

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.answers import answers
from nightjar.gpu_worker.engine import Engine
from nightjar.requests import GenerateRequest, SamplingParams

from .engine_figures import WARM
from .lab import Lab, MeasuringError, Points, Timing, found

FEWEST = 3
"""Mixed steps in a round; with fewer there is no figure."""

Span = tuple[torch.cuda.Event, torch.cuda.Event]


class Launch(NamedTuple):
    """What an engine began: when; whether it is a step with prompts and running sequences."""

    at: float
    mixed: bool


class MixedSteps:
    """Watches the steps and windows of an engine from now on.

    A mixed step takes from its own beginning to that of what the engine launches next.  The device
    works in the span of its forward pass, unless the host launches that too slowly.  Choosing
    tokens counts as the host's: it takes little.
    """

    def __init__(self, engine: Engine, device: str) -> None:
        """Raises MeasuringError where an engine on a GPU has no windows, and so records nothing."""
        self._launches: list[Launch] = []
        self._spans: list[Span] = []
        self._own: list[float] = []  # where there are no events: the host's seconds of each step
        self._host: list[float] = []  # the host's seconds of each forward pass
        self._is_mixed = False
        steps: Any = engine.executor  # not its type: methods are put in the place of their own
        steps.run = self._watched_step(steps.run)
        if device != "cuda":
            return
        if engine.windows is None:
            raise MeasuringError("the engine launches its steps one by one: it has no windows")
        windows: Any = engine.windows
        windows.launch = self._watched_window(windows.launch)
        windows.steps.forward = self._watched_forward(windows.steps.forward)

    def take(self) -> tuple[float, float, float]:
        """Seconds of the mixed steps since the last call, of the spans in them, and of the host
        while it launched these.

        Raises:
            MeasuringError: There were fewer than FEWEST.
        """
        pairs = list(pairwise(self._launches))
        took = [after.at - step.at for step, after in pairs if step.mixed]
        busy = [begin.elapsed_time(end) / 1e3 for begin, end in self._spans] or list(self._own)
        host = list(self._host)
        for kept in (self._launches, self._spans, self._own, self._host):
            kept.clear()
        if len(took) < FEWEST:
            raise MeasuringError(f"{len(took)} steps had prompts and running sequences")
        return sum(took), sum(busy[: len(took)]), sum(host[: len(took)])

    def _watched_step(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def watched(plan: Any) -> Any:  # noqa: ANN401 (a plan)
            self._is_mixed = bool(plan.prompts and plan.decodes)
            self._launches.append(Launch(time.perf_counter(), self._is_mixed))
            output = run(plan)
            if self._is_mixed:
                self._own.append(time.perf_counter() - self._launches[-1].at)
            self._is_mixed = False
            return output

        return watched

    def _watched_window(self, launch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def watched(window: Any) -> Any:  # noqa: ANN401 (a window)
            self._launches.append(Launch(time.perf_counter(), mixed=False))
            return launch(window)

        return watched

    def _watched_forward(self, forward: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def watched(batch: Any) -> Any:  # noqa: ANN401 (a batch)
            if not self._is_mixed:
                return forward(batch)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            started = time.perf_counter()
            hidden = forward(batch)
            self._host.append(time.perf_counter() - started)
            end.record()
            self._spans.append((begin, end))
            return hidden

        return watched


def mixed_steps(lab: Lab) -> Points:
    """The host's share of the steps in which prompts join running sequences.

    Four times as many texts as run at once, of lengths that differ, so that some end in most steps.
    """
    count, length, tokens = lab.scale.joining
    engine = lab.engine(lab.half, count // 4, length + 2 * tokens)
    prompts = lab.prompts([length] * count)
    requests = [
        GenerateRequest(i, prompt, SamplingParams(tokens + i % tokens, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]
    watched = MixedSteps(engine, lab.device)
    rows: list[tuple[float, float, float]] = []
    for number in range(WARM + lab.scale.rounds):
        engine.reset_prefix_cache()
        answers(engine, requests)
        lab.sync()
        took = watched.take()
        if number >= WARM:
            rows.append(took)
    steps, spans, hosts = zip(*rows, strict=True)
    about: dict[str, Any] = {
        "mixed": Timing(steps),
        "device": Timing(spans),
        "host_s": median(hosts),
    }
    about |= {"texts": count, "prompt": length}
    if median(hosts) > median(spans) / 2:
        about["warning"] = (
            "the host takes more than half of a forward pass's time to launch it: the device may "
            "wait for the host where this does not count it"
        )
    shares = [1 - span / step for step, span in zip(steps, spans, strict=True)]
    return found(about, mixed_host_share=median(shares))
