"""Requests for prefix caches: drawn by Hypothesis, and conversations."""

from itertools import count
from typing import Any

from hypothesis import strategies as st

from nightjar.gpu_worker.engine import (
    Engine,
    GenerateRequest,
    GenerateResult,
    RankRequest,
    Request,
    Result,
)
from tests.engines import drain, generate, ids

Traffic = tuple[list[list[Request]], dict[str, Any], int]
"""Waves of requests, the engine's limits, and its number of cache blocks."""


@st.composite
def traffic(draw: st.DrawFn) -> Traffic:
    """Requests that begin with one of a few prefixes, in waves, for engines of different limits."""
    prefixes = [ids(draw(st.integers(1, 90)), seed) for seed in range(3)]
    waves = []
    request_id = 0
    for _ in range(draw(st.integers(1, 3))):
        wave: list[Request] = []
        for _ in range(draw(st.integers(1, 5))):
            head = draw(st.sampled_from(prefixes))
            prompt = head[: draw(st.integers(1, len(head)))] + ids(
                draw(st.integers(0, 20)), request_id
            )
            if draw(st.booleans()):
                documents = [ids(n, n) for n in draw(st.lists(st.integers(1, 12), min_size=1))]
                wave.append(RankRequest(request_id, prompt, documents[:6]))
            else:
                wave.append(
                    generate(
                        request_id,
                        prompt,
                        draw(st.integers(1, 8)),
                        temperature=draw(st.sampled_from([0.0, 1.0])),
                        n=draw(st.sampled_from([1, 1, 2])),
                        seed=request_id,
                    )
                )
            request_id += 1
        waves.append(wave)
    config = {
        "max_running": draw(st.sampled_from([2, 64])),
        "max_step_tokens": draw(st.sampled_from([7, 48, 2048])),
    }
    return waves, config, draw(st.sampled_from([8, 12, 1000]))


def conversations(turns: int, count_: int = 3) -> list[GenerateRequest]:
    """Turns of several conversations in alternation: each prompt begins with the one before it."""
    numbers = count()
    return [
        generate(next(numbers), ids(34 + 28 * turn, seed), max_tokens=4, logprobs=2)
        for turn in range(turns)
        for seed in range(count_)
    ]


def one_by_one(engine: Engine, requests: list[GenerateRequest]) -> list[Result]:
    """The results of requests, each submitted when the one before it has ended."""
    found = [drain(engine, request)[request.request_id] for request in requests]
    assert all(isinstance(result, GenerateResult) for result in found)
    return found
