"""Engines for tests: requests in, results out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from nightjar.gpu_worker.engine import (
    Engine,
    EngineConfig,
    GenerateRequest,
    Request,
    Result,
    SamplingParams,
)
from nightjar.gpu_worker.engine.load_costs import LoadCosts
from nightjar.gpu_worker.models import Decoder, KVTensors

VOCAB = 512
"""The vocabulary of the tiny model."""


def random_ids(rng: np.random.Generator, count: int, vocab_size: int = VOCAB) -> list[int]:
    """Random token ids, none of them special."""
    found: list[int] = rng.integers(2, vocab_size, count).tolist()
    return found


def ids(count: int, seed: int = 0) -> list[int]:
    """Token ids of the tiny model, the same for the same seed."""
    return random_ids(np.random.default_rng(seed), count)


def generate(
    request_id: int = 0,
    prompt: Sequence[int] | None = None,
    max_tokens: int = 8,
    vectors: str | None = None,
    **params: object,
) -> GenerateRequest:
    """A request that ends by its length; without `prompt` it has a prompt of its own."""
    tokens = ids(5, request_id) if prompt is None else prompt
    sampling = SamplingParams(max_tokens, **({"ignore_eos": True} | params))  # type: ignore[arg-type]
    return GenerateRequest(request_id, tokens, sampling, vectors)


def drawn() -> list[GenerateRequest]:
    """Requests whose tokens are drawn at random, by three seeds."""
    return [generate(i, ids(5 + 9 * i), 12, temperature=1.0, seed=i % 3) for i in range(6)]


def drain(
    engine: Engine,
    *requests: Request,
    limit: int = 2000,
    after_step: Callable[[], object] = lambda: None,
) -> dict[int, Result]:
    """Submit requests and step until nothing is left; return the results by id, one for each.

    after_step: is called after each step.
    """
    for request in requests:
        engine.submit(request)
    results: dict[int, Result] = {}
    for _ in range(limit):
        if not engine.has_work:
            return results
        for result in engine.step():
            assert result.request_id not in results
            results[result.request_id] = result
        after_step()
    raise AssertionError("the engine does not come to an end")


def run(
    model: Decoder,
    token_bytes: Sequence[bytes],
    requests: Iterable[Request],
    named: Mapping[str, torch.Tensor | Mapping[str, torch.Tensor]] | None = None,
    **config: object,
) -> dict[int, Result]:
    """The results of requests that share a fresh engine.

    named: prompt vectors, and the factors of adapters, by key.
    """
    engine = Engine(model, token_bytes, EngineConfig(**config))  # type: ignore[arg-type]
    for key, value in (named or {}).items():
        if isinstance(value, torch.Tensor):
            engine.register_prompt_vectors(key, value)
        else:
            engine.register_adapter(key, value)
    return drain(engine, *requests)


def one(model: Decoder, token_bytes: Sequence[bytes], request: Request, **config: object) -> Result:
    """The result of a request in an engine of its own."""
    return run(model, token_bytes, [request], **config)[request.request_id]


def block_bytes(model: Decoder) -> int:
    """The bytes of a cache block in an engine with the default block size."""
    return KVTensors.block_bytes(model.config, EngineConfig().block_size, model.cache_dtype)


def assert_nothing_held(engine: Engine) -> None:
    """Every block is free or resting, none reserved, and no request is remembered."""
    pool, scheduler = engine.pool, engine.scheduler
    assert not pool.held
    assert pool.reserved == 0
    assert sorted(pool.unheld) == list(range(pool.total))
    assert pool.resting == pool.known
    assert not engine.has_work
    assert not scheduler.has_waiting
    assert not scheduler.running
    if engine.rescue is not None and engine.rescue.engine is not None:
        assert isinstance(engine.rescue.engine, Engine)
        assert_nothing_held(engine.rescue.engine)


def load_always(engine: Engine) -> None:
    """Let an engine load every prefix that its host tier holds, whatever it measures."""
    assert engine.tier is not None
    costs = LoadCosts(1.0, 1e-12, 0.0)
    costs.stepped = lambda plan, seconds: None  # type: ignore[method-assign]
    engine.tier.costs = costs
