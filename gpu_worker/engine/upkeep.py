"""Prepares the cache for a step: saves, clears, copies and loads blocks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from nightjar.gpu_worker.engine.config import EngineConfig
from nightjar.gpu_worker.engine.host_tier import HostTier
from nightjar.gpu_worker.engine.kv_cache import BlockPool
from nightjar.gpu_worker.engine.load_costs import LoadCosts
from nightjar.gpu_worker.engine.sizing import block_bytes
from nightjar.gpu_worker.engine.transfers import transfers
from nightjar.gpu_worker.models import Arrivals, Decoder, KVTensors

logger = logging.getLogger(__name__)


class CacheUpkeep:
    """Prepares the blocks that were drawn since the last step, before anything writes to them."""

    def __init__(
        self, cache: KVTensors, pool: BlockPool, tier: HostTier | None, step_blocks: int
    ) -> None:
        """step_blocks: how many blocks the prompts of one step fill."""
        self._cache = cache
        self._pool = pool
        self._tier = tier
        self._step_blocks = step_blocks

    def prepare(self, copies: Sequence[tuple[int, int]] = ()) -> Arrivals | None:
        """Prepare the cache; return the loads that the forward pass has to wait for.

        copies: pairs of blocks (source, copy).
        """
        tier = self._tier
        if tier is not None:
            tier.before_writes()
        self._cache.clear(self._pool.take_dirty())  # before copies into such blocks
        self._cache.copy(list(copies))
        if tier is None:
            return None
        return tier.start_loads()

    def beside_compute(self) -> None:
        """Save blocks while the device computes the step; called when the step is launched."""
        if self._tier is not None:
            self._tier.save_early(self._pool.next_evicted(self._step_blocks))


def host_tier(model: Decoder, cache: KVTensors, config: EngineConfig) -> HostTier | None:
    """Make the host tier below a cache, as large as the settings say.

    None where the settings say 0, and for a model in several processes. There each process holds
    its own heads' part of every block, and no command tells the others what to save and to load.

    Raises:
        ValueError: The memory does not hold one block.
    """
    if not config.host_cache_bytes:
        return None
    if model.in_lockstep:
        logger.warning("the model is split over processes: host_cache_bytes has no effect")
        return None
    one_block = block_bytes(model, config)
    slots = config.host_cache_bytes // one_block
    if slots < 1:
        raise ValueError(
            f"host_cache_bytes {config.host_cache_bytes}: one block takes {one_block}; 0 for none"
        )
    costs = LoadCosts.estimated(model.config, model.device)
    moved = transfers(cache, slots, costs.moved)
    return HostTier(moved, slots, one_block, config.block_size, costs)
