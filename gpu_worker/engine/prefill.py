"""Brings prefixes into the cache: opens them, cuts them to a step's rows, and publishes them."""

from __future__ import annotations

from enum import Enum, auto

from nightjar.gpu_worker.engine.host_tier import HostTier
from nightjar.gpu_worker.engine.kv_cache import BlockPool, BlockTable
from nightjar.gpu_worker.engine.plan import PrefixChunk
from nightjar.gpu_worker.engine.sequence import Prefix


class Opening(Enum):
    """Whether a prefix may start."""

    OPENED = auto()
    NO_BLOCKS = auto()
    PREFIX_UNDER_WAY = auto()


class Prefill:
    """Plans the prefixes of one step.

    Whole blocks that the cache knows are shared.  The cache may also know the beginning of the
    next block: that is copied.

    A prefix waits while another one computes its next block.  It then finds the block in the cache.
    When a prefix lacks blocks, no other is opened in this step.  Else smaller prefixes would take
    the blocks that it waits for.
    """

    def __init__(self, pool: BlockPool, tier: HostTier | None = None) -> None:
        self._pool = pool
        self._tier = tier
        self._grains = pool.block_size // pool.grain  # of a block
        self._copies: dict[int, int] = {}  # the source of each copy; it is held until the copy
        self._under_way: set[bytes] = set()
        self._blocks_lack = False
        self.started_tokens = 0  # of the prefixes that were opened
        self.cached_tokens = 0  # of those, what the cache or the host's memory held

    def new_step(self) -> None:
        """Forget the last step's plan."""
        self._under_way.clear()
        self._blocks_lack = False

    def open(self, prefix: Prefix) -> Opening:
        """Reserve a prefix's blocks, and share those that the cache knows."""
        # Rows that predict a scored token or the next token are computed in any case.
        usable = prefix.keys[: (prefix.scored_from - 1) // self._pool.grain]
        filling = usable[self._grains - 1 :: self._grains]
        known = self._pool.find(filling)
        if len(known) < len(filling) and filling[len(known)] in self._under_way:
            return Opening.PREFIX_UNDER_WAY
        own = prefix.max_blocks - len(known)
        if self._blocks_lack or not self._pool.reserve(own, known):
            self._blocks_lack = True
            return Opening.NO_BLOCKS
        prefix.table = BlockTable(self._pool, own, known)
        prefix.computed = len(known) * self._pool.block_size
        prefix.borrowed = bool(known)
        if self._tier is not None:
            self._load(self._tier, prefix, filling[len(known) :])
        self._copy_beginning(prefix, usable)
        prefix.cached = prefix.computed
        self.started_tokens += len(prefix.tokens)
        self.cached_tokens += prefix.computed
        return Opening.OPENED

    def take_copies(self) -> dict[int, int]:
        """The source of each block to copy, all at once, before the next forward pass."""
        copies, self._copies = self._copies, {}
        for source in copies.values():
            self._pool.release(source)
        return copies

    def _copy_beginning(self, prefix: Prefix, usable: list[bytes]) -> None:
        """Copy what the cache knows of the beginning of a prefix's next block."""
        start = prefix.computed // self._pool.grain
        found = self._pool.find_beginning(usable[start : start + self._grains - 1])
        if found is None:
            return
        source, index = found
        # Held until the copy is made, because the next prefix might draw it.
        if not self._pool.reserve(0, [source]):
            return
        prefix.computed += (index + 1) * self._pool.grain
        prefix.held.grow(prefix.computed)
        self._copies[prefix.held.blocks[-1]] = source

    def _load(self, tier: HostTier, prefix: Prefix, keys: list[bytes]) -> None:
        """Load the next blocks from the host's memory where that is cheaper than computing them.

        Other prefixes may share these blocks at once, because their steps are not before this one.
        """
        wanted = tier.worth_loading(keys)
        if not wanted:
            return
        slots = tier.claim(wanted)  # before the draws, which may move other blocks to the host
        prefix.computed += len(wanted) * self._pool.block_size
        prefix.held.grow(prefix.computed)
        blocks = prefix.held.blocks[-len(wanted) :]
        tier.load(blocks, slots)
        for block, key in zip(blocks, wanted, strict=True):
            self._pool.publish(block, key)

    def cut(self, prefix: Prefix, rows: int, alone: bool) -> PrefixChunk | None:
        """Return as much of an open prefix as the rows allow, or None.

        A shortened part ends with a block.  alone: only running sequences share the step, so that
        rows that do not fill a block are used as well.
        """
        start, size = prefix.computed, self._pool.block_size
        end = min(len(prefix.tokens), start + max(0, rows))
        if end < len(prefix.tokens):
            whole = end // size * size
            if whole > start:
                end = whole
            elif not alone:
                return None
        if end == start:
            return None
        prefix.held.grow(end)
        filling = prefix.keys[self._grains - 1 :: self._grains]
        self._under_way.update(filling[start // size : end // size])
        return PrefixChunk(prefix, start, end)

    def publish(self, chunk: PrefixChunk) -> None:
        """Make the whole blocks of a computed chunk known to other prefixes."""
        prefix, size = chunk.prefix, self._pool.block_size
        prefix.computed = chunk.end
        filling = prefix.keys[self._grains - 1 :: self._grains]
        whole = slice(chunk.start // size, chunk.end // size)
        for block, key in zip(prefix.held.blocks[whole], filling[whole], strict=False):
            self._pool.publish(block, key)

    def publish_beginnings(self, prefix: Prefix) -> None:
        """Make the beginnings of a prompt's blocks known, once its scores are finite.

        A copy of a block also holds what comes after the beginning, and a NaN there would spoil it.
        """
        for index, key in enumerate(prefix.keys):
            block, within = divmod(index + 1, self._grains)
            if within:
                self._pool.publish_beginning(prefix.held.blocks[block], key)
