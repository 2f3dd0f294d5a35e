"""What the CUDA engine's tests ask for, and what they read of its answers."""

import numpy as np

from nightjar.gpu_worker.engine import Engine, EngineConfig
from tests.engines import random_ids

CACHE = {"kv_cache_bytes": 1 << 23}


def prompt(length, seed=0):
    """Random token ids."""
    return random_ids(np.random.default_rng(seed), length, 320)


def tokens(results):
    """The token ids of each output, by request."""
    return {number: [output.token_ids for output in r.outputs] for number, r in results.items()}


def engine_of(model, texts, **config):
    """An engine with a small cache."""
    return Engine(model, texts, EngineConfig(**(CACHE | config)))
