"""The cache made ready for a step: what leaves it, what is cleared, copied and comes in."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from nightjar.gpu_worker.engine.config import EngineConfig
from nightjar.gpu_worker.engine.host_tier import HostTier
from nightjar.gpu_worker.engine.kv_cache import BlockPool
from nightjar.gpu_worker.engine.load_costs import LoadCosts
from nightjar.gpu_worker.engine.transfers import transfers
from nightjar.gpu_worker.models import Arrivals, Decoder, KVTensors

logger = logging.getLogger(__name__)


class CacheUpkeep:
    """Does what blocks need that were drawn since the last step, before anything writes to them."""

    def __init__(
        self, cache: KVTensors, pool: BlockPool, tier: HostTier | None, step_blocks: int
    ) -> None:
        """step_blocks: that the prompts of a step fill."""
        self._cache = cache
        self._pool = pool
        self._tier = tier
        self._step_blocks = step_blocks

    def prepare(self, copies: Sequence[tuple[int, int]] = ()) -> Arrivals | None:
        """Everything up to the forward pass, which is to wait for what is returned.

        copies: blocks (source, copy).
        """
        tier = self._tier
        if tier is not None:
            tier.before_writes()
        self._cache.clear(self._pool.take_dirty())  # first: a copy may go to a cleared block
        self._cache.copy(list(copies))
        if tier is None:
            return None
        return tier.start_loads()

    def beside_compute(self) -> None:
        """What has time until the step's results are there; called when the step is launched."""
        if self._tier is not None:
            self._tier.save_ahead(self._pool.next_evicted(self._step_blocks))


def host_tier(model: Decoder, cache: KVTensors, config: EngineConfig) -> HostTier | None:
    """The tier below a cache, as large as the settings say.

    None where they want none, and for a model in several processes: each holds its own heads' part
    of every block, and nobody tells the others what to save and to load.

    Raises:
        ValueError: The memory does not hold one block.
    """
    if not config.host_cache_bytes:
        return None
    if model.in_lockstep:
        logger.warning("the model is split over processes: host_cache_bytes has no effect")
        return None
    block_bytes = KVTensors.block_bytes(model.config, config.block_size, model.cache_dtype)
    slots = config.host_cache_bytes // block_bytes
    if slots < 1:
        raise ValueError(
            f"host_cache_bytes {config.host_cache_bytes}: one block takes {block_bytes}; 0 for none"
        )
    costs = LoadCosts.estimated(model.config, model.device)
    moved = transfers(cache, slots, costs.moved)
    return HostTier(moved, slots, block_bytes, config.block_size, costs)
