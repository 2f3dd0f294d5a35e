"""Engines with a host tier, for tests."""

from collections.abc import Sequence
from typing import Any

from nightjar.gpu_worker.engine import Engine, EngineConfig
from nightjar.gpu_worker.models import Decoder
from tests.engines import assert_nothing_held, block_bytes, load_always


def engine_of(
    model: Decoder, token_bytes: Sequence[bytes], blocks: int, slots: int, **config: Any
) -> Engine:
    """An engine with so many cache blocks and slots in its host tier; it loads whatever it can."""
    block = block_bytes(model)
    config |= {"kv_cache_bytes": blocks * block, "host_cache_bytes": slots * block}
    engine = Engine(model, token_bytes, EngineConfig(**config))
    if slots:
        load_always(engine)
    return engine


def assert_consistent(engine: Engine) -> None:
    """Every slot is free or has a key, no load is queued, and no block is held."""
    assert_nothing_held(engine)
    tier = engine.tier
    assert tier is not None
    slots = [*tier.free_slots, *tier.slot_of.values()]
    assert sorted(slots) == list(range(tier.slots))
    assert not tier.queued_loads
