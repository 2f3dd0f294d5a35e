"""The number of cache blocks of an engine, and of the engine that rescues its requests."""

from __future__ import annotations

from dataclasses import replace

from nightjar.gpu_worker.engine.config import EngineConfig
from nightjar.gpu_worker.models import Decoder, KVTensors

RESCUE_CACHE_BYTES = 4 << 30


def block_bytes(model: Decoder, config: EngineConfig) -> int:
    """Return the bytes of one block's keys and values, all layers together."""
    sizes = model.config, config.block_size, model.cache_dtype
    return KVTensors.block_bytes(*sizes, fp8=config.fp8_cache)


def cache_blocks(model: Decoder, config: EngineConfig) -> int:
    """Return how many blocks the cache's memory holds.

    Raises:
        ValueError: The memory does not hold one block.
    """
    per_block = block_bytes(model, config)
    affordable = config.kv_cache_bytes // per_block
    if affordable < 1:
        raise ValueError(f"kv_cache_bytes {config.kv_cache_bytes}: one block takes {per_block}")
    return affordable


def rescue_config(model: Decoder, config: EngineConfig, blocks: int) -> EngineConfig:
    """Return the settings of an engine over a more precise model, with as many blocks as the first.

    What fits the first engine then fits this one. The memory is bounded, because a GPU's cache may
    be larger than the host's memory. Keys and values are not in FP8.
    """
    config = replace(config, fp8_cache=False, host_cache_bytes=0)
    cache_bytes = min(blocks * block_bytes(model, config), RESCUE_CACHE_BYTES)
    return replace(config, kv_cache_bytes=cache_bytes)
