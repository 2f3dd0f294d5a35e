"""Blocks of the paged cache: who holds which, and how many are spoken for."""

from __future__ import annotations

import heapq


class BlockPool:
    """A fixed number of cache blocks, each held by one table at most.

    A request reserves all the blocks it can come to need before it starts and draws them one by
    one as it grows, so a running request never waits for memory and is never thrown out.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.total = blocks
        self.block_size = block_size
        self._free = list(range(blocks))  # a heap: low blocks first keeps the used ones together
        self._reserved = 0
        self._fresh: list[int] = []

    @property
    def available(self) -> int:
        """Blocks that are neither held nor reserved."""
        return len(self._free) - self._reserved

    def blocks_for(self, tokens: int) -> int:
        """Blocks that this many tokens fill."""
        return -(-tokens // self.block_size)

    def reserve(self, blocks: int) -> bool:
        """Set blocks aside for one request; False, and nothing changed, if there are too few."""
        if blocks > self.available:
            return False
        self._reserved += blocks
        return True

    def unreserve(self, blocks: int) -> None:
        """Give back blocks that were set aside and never drawn."""
        self._reserved -= blocks

    def draw(self) -> int:
        """Turn one reserved block into a held one."""
        self._reserved -= 1
        block = heapq.heappop(self._free)
        self._fresh.append(block)
        return block

    def take_fresh(self) -> list[int]:
        """Blocks drawn since the last call: what they hold belonged to others."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def release(self, block: int) -> None:
        """The table lets go of the block."""
        heapq.heappush(self._free, block)


class BlockTable:
    """The blocks of one sequence, in order of position."""

    def __init__(self, pool: BlockPool, max_tokens: int) -> None:
        self._pool = pool
        self._undrawn = pool.blocks_for(max_tokens)
        self.blocks: list[int] = []

    @staticmethod
    def reserve(pool: BlockPool, max_tokens: int) -> BlockTable | None:
        """A table with room for max_tokens, or None where the pool is too full now."""
        return BlockTable(pool, max_tokens) if pool.reserve(pool.blocks_for(max_tokens)) else None

    def grow(self, tokens: int) -> None:
        """Hold blocks for the first `tokens` positions."""
        while len(self.blocks) * self._pool.block_size < tokens:
            self.blocks.append(self._pool.draw())
            self._undrawn -= 1

    def free(self) -> None:
        """Give everything back."""
        for block in self.blocks:
            self._pool.release(block)
        self._pool.unreserve(self._undrawn)
        self.blocks, self._undrawn = [], 0
