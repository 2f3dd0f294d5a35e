"""An engine's memory does not grow with the requests that it has answered."""

import gc
from itertools import groupby
from operator import itemgetter

import numpy as np
import pytest
import torch

from nightjar.gpu_worker.engine import (
    BeamSearch,
    Engine,
    EngineConfig,
    GenerateRequest,
    RankRequest,
    SamplingParams,
)
from tests.engines import assert_nothing_held, drain, random_ids

ROUND = 100
"""Requests of a round; each round has the same lengths and different tokens."""


def requests(first):
    """Requests of all kinds, from the id `first` on: those that need the host in each step, and
    those that may run in windows."""
    shapes, rng = np.random.default_rng(0), np.random.default_rng(first)
    system = random_ids(rng, 40)
    hosted, alone = [], []
    for i in range(first, first + ROUND):
        prompt = random_ids(rng, int(shapes.integers(1, 40)))
        kind = i % 5
        if kind == 0:
            documents = [random_ids(rng, int(shapes.integers(1, 9))) for _ in range(4)]
            hosted.append(RankRequest(i, system + prompt[:20], documents))
            continue
        extra = (
            {},
            {"temperature": 0.9, "top_p": 0.9, "seed": i},
            {"n": 2, "temperature": 1.0, "top_k": 20},
            {"beams": BeamSearch(2), "logprobs": 2},
        )[kind - 1]
        params = SamplingParams(int(shapes.integers(1, 9)), ignore_eos=True, **extra)
        (hosted if kind == 4 else alone).append(GenerateRequest(i, prompt, params))
    return hosted, alone


def drained(engine, requests):
    """The results, and after how many steps a window of decode steps was under way."""
    windows, flying = engine.windows, []
    if windows is None:
        return drain(engine, *requests), 0
    results = drain(engine, *requests, after_step=lambda: flying.append(windows.in_flight))
    return results, sum(flying)


def held_bytes(device):
    """The bytes of all tensors on the device, and the bytes that the whole process has taken.

    The second number includes loaded kernels, CuPy and recorded graphs.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.memory_allocated(), total - free
    storages = {}
    for thing in gc.get_objects():
        # isinstance would ask lazy modules; packed weights show no storage.
        if issubclass(type(thing), torch.Tensor) and not thing.is_mkldnn:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values()), 0


@pytest.mark.timeout(600)
def test_memory_is_flat_over_a_thousand_requests(llama, llama_model, engine_device):
    config = EngineConfig(max_running=16, max_step_tokens=128, kv_cache_bytes=16 << 20)
    engine = Engine(llama_model, llama.tokenizer().token_bytes, config)
    levels, shapes = [], []
    for first in range(0, 12 * ROUND, ROUND):
        hosted, alone = requests(first)
        results = drain(engine, *hosted)
        others, flying = drained(engine, alone)
        results |= others
        assert len(results) == ROUND
        assert flying > 5 or engine_device == "cpu"
        assert all(hasattr(result, "prompt_tokens") for result in results.values())
        assert_nothing_held(engine)
        del results, others
        levels.append(held_bytes(engine_device))
        steps = None if engine.windows is None else engine.windows.steps
        shapes.append(0 if steps is None else (steps.shapes_held, steps.padded.recordings_held))
    # The first two rounds load kernels, capture graphs and fill caches.
    tensors, process = zip(*levels[2:], strict=True)
    assert len(tensors) * ROUND == 1000
    assert_flat(tensors, shapes[2:], 64 << 10)
    assert_flat(process, shapes[2:], 32 << 20)


def assert_flat(levels, shapes, slack):
    """Between two captures memory is flat.

    A shape that comes late is captured late and takes memory once.  Most rounds capture nothing.
    """
    by_shapes = groupby(zip(shapes, levels, strict=True), key=itemgetter(0))
    runs = [[level for _, level in run] for _, run in by_shapes]
    assert len(runs) <= len(levels) // 2, shapes
    for run in runs:
        assert max(run) <= run[0] + slack, (levels, shapes)


def test_memory_that_grows_without_a_new_shape_is_seen():
    assert_flat([1, 1, 9, 9, 9], [3, 3, 4, 4, 4], 2)
    with pytest.raises(AssertionError):
        assert_flat([1, 2, 4, 5], [3, 3, 3, 3], 2)
    with pytest.raises(AssertionError):
        assert_flat([1, 2, 3, 4], [3, 4, 5, 6], 2)


def test_a_tensor_that_is_kept_is_seen(engine_device):
    before = held_bytes(engine_device)[0]
    kept = torch.ones(1 << 20, device=engine_device)
    assert held_bytes(engine_device)[0] - before >= 4 << 20
    del kept
    assert held_bytes(engine_device)[0] == before
