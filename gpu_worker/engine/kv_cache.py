"""Blocks of the paged cache: who holds them, which prefixes they carry, how many are reserved."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Protocol

BEGINNING = 8
"""The beginning of a block is known in steps of so many tokens.  Each step costs a hash."""


class NextTier(Protocol):
    """Takes prefixes that the pool has no room for."""

    def evicted(self, block: int, key: bytes) -> None:
        """Note that the block will be used for something else."""

    def spoiled(self, key: bytes) -> None:
        """Forget a prefix whose numbers may not be finite."""

    def forget(self) -> None:
        """Forget every prefix."""


class BlockPool:
    """A fixed number of cache blocks, counted by reference.

    A block is free, held or resting.  A held block belongs to one table or several.  A resting
    block belongs to none and is kept because it carries the end of a known prefix.  Resting blocks
    are taken back when no block is free, the least recently used first.  Before a request starts,
    it reserves all the blocks that it can need.  It draws them as it grows.  So a running request
    never waits for memory and is never thrown out.
    """

    def __init__(self, blocks: int, block_size: int, next_tier: NextTier | None = None) -> None:
        self._next_tier = next_tier
        self.total = blocks
        self.block_size = block_size
        self.grain = math.gcd(block_size, BEGINNING)
        self._free = list(range(blocks))  # a heap: low blocks first keeps the used ones together
        self._reserved = 0
        self._holders = [0] * blocks
        self._tainted: set[int] = set()
        self._dirty: list[int] = []
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}  # prefixes that fill their last block
        self._beginnings: dict[int, list[bytes]] = {}  # prefixes that end within a block
        self._resting: dict[int, None] = {}  # in the order in which they came to rest

    @property
    def available(self) -> int:
        """How many blocks a request may still reserve: free or resting, and not reserved."""
        return len(self._free) + len(self._resting) - self._reserved

    @property
    def reserved(self) -> int:
        """Blocks that are set aside for requests and not drawn yet."""
        return self._reserved

    @property
    def held(self) -> dict[int, int]:
        """The blocks that tables hold, each with the number of these tables."""
        return {block: holders for block, holders in enumerate(self._holders) if holders}

    @property
    def unheld(self) -> list[int]:
        """The blocks that no table holds: the free ones, then the resting ones."""
        return [*self._free, *self._resting]

    @property
    def resting(self) -> set[int]:
        """The blocks that no table holds and that keep a known prefix."""
        return set(self._resting)

    @property
    def known(self) -> set[int]:
        """The blocks in which a known prefix ends."""
        return self._keys.keys() | self._beginnings.keys()

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks so many tokens fill."""
        return -(-tokens // self.block_size)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix: those of the first keys, without a gap."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def find_beginning(self, keys: Sequence[bytes]) -> tuple[int, int] | None:
        """Return a block whose first tokens end the longest known prefix, and that prefix's index.

        Returns None if no prefix is known.  keys: of prefixes that end one, two and more grains
        into the same block.
        """
        for index in reversed(range(len(keys))):
            block = self._by_key.get(keys[index])
            if block is not None:
                return block, index
        return None

    def reserve(self, blocks: int, shared: Sequence[int] = ()) -> bool:
        """Reserve blocks for one request and hold `shared` for it.

        Returns False and changes nothing if there are too few.
        """
        woken = sum(block in self._resting for block in shared)
        if blocks + woken > self.available:
            return False
        self._reserved += blocks
        for block in shared:
            self.hold(block)
        return True

    def unreserve(self, blocks: int) -> None:
        """Give back blocks that were reserved and not drawn."""
        self._reserved -= blocks

    def draw(self) -> int:
        """Turn one reserved block into a held one."""
        self._reserved -= 1
        block = heapq.heappop(self._free) if self._free else self._evict()
        self._holders[block] = 1
        if block in self._tainted:
            self._tainted.remove(block)
            self._dirty.append(block)
        return block

    def hold(self, block: int) -> None:
        """Note that one more table holds the block."""
        self._resting.pop(block, None)
        self._holders[block] += 1

    def release(self, block: int) -> bool:
        """Let one table drop the block; return whether it was the last one."""
        self._holders[block] -= 1
        if self._holders[block]:
            return False
        if block in self._keys or block in self._beginnings:
            self._resting[block] = None
        else:
            heapq.heappush(self._free, block)
        return True

    def publish(self, block: int, key: bytes) -> None:
        """Make a computed block known under the key of the prefix that it ends.

        The first block that carries a prefix stays the known one.  A tainted block stays unknown.
        """
        if key not in self._by_key and block not in self._keys and block not in self._tainted:
            self._by_key[key] = block
            self._keys[block] = key

    def publish_beginning(self, block: int, key: bytes) -> None:
        """Do the same for a prefix that ends within the block."""
        if key not in self._by_key and block not in self._tainted:
            self._by_key[key] = block
            self._beginnings.setdefault(block, []).append(key)

    def taint(self, blocks: Sequence[int]) -> None:
        """Mark blocks whose numbers may not be finite.

        They are unknown from now on and zeroed before the next use.  Attention multiplies what lies
        past a sequence's end by 0, and a NaN there would stay a NaN.  Tables that hold such a block
        keep it as it is.
        """
        for block in blocks:
            self._tainted.add(block)
            key = self._make_unknown(block)
            if key is not None and self._next_tier is not None:
                self._next_tier.spoiled(key)
            if block in self._resting:
                del self._resting[block]
                heapq.heappush(self._free, block)

    def forget(self) -> None:
        """Make every prefix unknown; blocks that no table holds are free again."""
        for block in self._resting:
            heapq.heappush(self._free, block)
        self._resting.clear()
        self._by_key.clear()
        self._keys.clear()
        self._beginnings.clear()
        if self._next_tier is not None:
            self._next_tier.forget()

    def next_evicted(self, draws: int) -> list[tuple[int, bytes]]:
        """Return whole blocks with their keys that so many draws would take back."""
        count = max(0, draws - len(self._free))
        blocks = islice(self._resting, count)
        return [(block, self._keys[block]) for block in blocks if block in self._keys]

    def take_dirty(self) -> list[int]:
        """Return the tainted blocks that were drawn since the last call."""
        dirty, self._dirty = self._dirty, []
        return dirty

    def _evict(self) -> int:
        """Forget the prefix that rested longest."""
        block = next(iter(self._resting))
        del self._resting[block]
        key = self._make_unknown(block)
        if key is not None and self._next_tier is not None:
            self._next_tier.evicted(block, key)
        return block

    def _make_unknown(self, block: int) -> bytes | None:
        """Make the block unknown; return the key of the prefix that fills it, if one was known."""
        for beginning in self._beginnings.pop(block, ()):
            del self._by_key[beginning]
        key = self._keys.pop(block, None)
        if key is not None:
            del self._by_key[key]
        return key


class BlockTable:
    """The blocks of one sequence, in order of position; the first ones may be shared."""

    def __init__(self, pool: BlockPool, reserved: int, shared: Sequence[int] = ()) -> None:
        """reserved: blocks reserved in the pool; shared: blocks already held for this table."""
        self._pool = pool
        self._undrawn = reserved
        self.blocks = list(shared)

    def grow(self, tokens: int) -> None:
        """Hold blocks for the first `tokens` positions."""
        while len(self.blocks) * self._pool.block_size < tokens:
            self.blocks.append(self._pool.draw())
            self._undrawn -= 1

    def fork(
        self, tokens: int, reserved: int, payer: BlockTable
    ) -> tuple[BlockTable, tuple[int, int] | None]:
        """Make a second table over the first `tokens` positions.

        `reserved` blocks of the payer's reservation become its own.  Whole blocks are shared.  A
        partly filled last block is the new table's own: the caller must make the returned copy
        (source, copy).
        """
        whole = tokens // self._pool.block_size
        for block in self.blocks[:whole]:
            self._pool.hold(block)
        table = payer.split(reserved)
        table.blocks.extend(self.blocks[:whole])
        if tokens % self._pool.block_size == 0:
            return table, None
        table.grow(tokens)
        return table, (self.blocks[whole], table.blocks[whole])

    def split(self, reserved: int) -> BlockTable:
        """Make an empty table with `reserved` blocks of this table's reservation."""
        if reserved > self._undrawn:
            raise RuntimeError(f"{reserved} blocks asked of a reservation of {self._undrawn}")
        self._undrawn -= reserved
        return BlockTable(self._pool, reserved)

    def merge(self, other: BlockTable) -> None:
        """Take over another table's reservation and the blocks that it frees; that table ends."""
        freed = sum(self._pool.release(block) for block in reversed(other.blocks))
        self._pool.reserve(freed)
        self._undrawn += freed + other._undrawn
        other.blocks, other._undrawn = [], 0

    def free(self) -> None:
        """Give everything back; the end of a prefix is forgotten before its beginning."""
        for block in reversed(self.blocks):
            self._pool.release(block)
        self._pool.unreserve(self._undrawn)
        self.blocks, self._undrawn = [], 0


def prefix_keys(tokens: Sequence[int], grain: int, salt: int) -> list[bytes]:
    """Return the keys of the first `grain` tokens, of twice as many, and so on.

    A key is a hash of all these tokens: 128 bits of BLAKE2b, so that two prefixes never share one.
    salt: what else decides the keys and values, namely the prompt vectors that ids past the
    vocabulary name.
    """
    whole = len(tokens) // grain
    data = array("q", tokens[: whole * grain]).tobytes()
    step = grain * 8
    keys, key = [], salt.to_bytes(16, "little")
    for start in range(0, len(data), step):
        key = blake2b(key + data[start : start + step], digest_size=16).digest()
        keys.append(key)
    return keys
