"""Prefixes on their way into the cache: opened, cut to what a step has room for, and published."""

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
    """What the step being planned does with prefixes.

    Whole blocks that the cache knows are shared.  Of the block after them a prefix may know the
    beginning: that is copied.

    One whose next block is just being computed for another waits for it: it then finds the block
    in the cache.  As soon as one lacks blocks, none is opened any more in this step: smaller ones
    would take, one by one, the blocks it waits for.
    """

    def __init__(self, pool: BlockPool, tier: HostTier | None = None) -> None:
        self._pool = pool
        self._tier = tier
        self._grains = pool.block_size // pool.grain  # of a block
        self._copies: dict[int, int] = {}  # the source of each copy; sources are held
        self._under_way: set[bytes] = set()
        self._blocks_lack = False

    def new_step(self) -> None:
        """Forget what the last step computed and lacked."""
        self._under_way.clear()
        self._blocks_lack = False

    def open(self, prefix: Prefix) -> Opening:
        """Reserve a prefix's blocks, taking from the cache what it knows."""
        # What a scored token or the next one is predicted from is computed here in any case.
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
        return Opening.OPENED

    def take_copies(self) -> dict[int, int]:
        """The source of each block to copy, all at once, before the next forward pass."""
        copies, self._copies = self._copies, {}
        for source in copies.values():
            self._pool.release(source)
        return copies

    def _copy_beginning(self, prefix: Prefix, usable: list[bytes]) -> None:
        """Take from the cache what it knows of the block that a prefix goes on with."""
        start = prefix.computed // self._pool.grain
        found = self._pool.find_beginning(usable[start : start + self._grains - 1])
        if found is None:
            return
        source, index = found
        # Held until the copies are made: the next prefix might draw it.
        if not self._pool.reserve(0, [source]):
            return
        prefix.computed += (index + 1) * self._pool.grain
        prefix.held.grow(prefix.computed)
        self._copies[prefix.held.blocks[-1]] = source

    def _load(self, tier: HostTier, prefix: Prefix, keys: list[bytes]) -> None:
        """Take from the host's memory what of the next keys is there and cheaper than computing.

        Others may find these blocks at once: their steps are not before this one.
        """
        wanted = tier.worth_loading(keys)
        if not wanted:
            return
        slots = tier.claim(wanted)  # first: drawing may move other blocks there
        prefix.computed += len(wanted) * self._pool.block_size
        prefix.held.grow(prefix.computed)
        blocks = prefix.held.blocks[-len(wanted) :]
        tier.load(blocks, slots)
        for block, key in zip(blocks, wanted, strict=True):
            self._pool.publish(block, key)

    def cut(self, prefix: Prefix, rows: int, alone: bool) -> PrefixChunk | None:
        """As much of an open prefix as the rows allow, or None; cut short, it ends with a block.

        alone: nothing but running sequences shares the step, so that rows too few for a block are
        better used than left.
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
        """Let others find the whole blocks of a chunk that was computed."""
        prefix, size = chunk.prefix, self._pool.block_size
        prefix.computed = chunk.end
        filling = prefix.keys[self._grains - 1 :: self._grains]
        whole = slice(chunk.start // size, chunk.end // size)
        for block, key in zip(prefix.held.blocks[whole], filling[whole], strict=False):
            self._pool.publish(block, key)

    def publish_beginnings(self, prefix: Prefix) -> None:
        """Let others find the beginnings of a prompt's blocks, once finite scores vouch for all of
        it: a copy holds what comes after the beginning, too, and a NaN there would spoil it."""
        for index, key in enumerate(prefix.keys):
            block, within = divmod(index + 1, self._grains)
            if within:
                self._pool.publish_beginning(prefix.held.blocks[block], key)
