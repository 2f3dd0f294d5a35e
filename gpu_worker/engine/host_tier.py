"""Keeps prefixes in the host's memory that the cache had no room for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from nightjar.gpu_worker.engine.load_costs import LoadCosts
from nightjar.gpu_worker.engine.transfers import Transfers
from nightjar.gpu_worker.models import Arrivals


class HostTier:
    """A fixed number of slots, one block each, by the keys of prefixes.

    The least recently used prefix goes first.  A prefix is saved when the pool takes back the block
    that it fills, or shortly before.  Only requests that ended well held such a block, so its
    numbers are finite.  A loaded prefix stays here, so that it need not be saved again.  The saves
    and loads of a step are collected while it is planned.  They happen before it writes, saves
    first.
    """

    def __init__(
        self, transfers: Transfers, slots: int, block_bytes: int, block_size: int, costs: LoadCosts
    ) -> None:
        self.slots = slots
        self.costs = costs
        self.transfers = transfers
        self._block_bytes = block_bytes
        self._block_size = block_size
        self._by_key: dict[bytes, int] = {}  # the least recently used first
        self._free = list(range(slots))
        # Of the planned step: blocks and their slots, and blocks whose saves must be complete.
        self._leaving: dict[int, int] = {}
        self._coming: list[tuple[int, int]] = []
        self._overwritten: list[int] = []
        # Slots that planned or running transfers read or write.
        self._claimed: set[int] = set()
        self._reading: set[int] = set()

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    @property
    def slot_of(self) -> Mapping[bytes, int]:
        """The slots by the keys of their prefixes, the least recently used first."""
        return MappingProxyType(self._by_key)

    @property
    def free_slots(self) -> Sequence[int]:
        """The slots that hold no prefix."""
        return tuple(self._free)

    @property
    def queued_loads(self) -> int:
        """How many blocks the step being planned loads."""
        return len(self._coming)

    def worth_loading(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return the first of these keys that are here without a gap, if loading is faster."""
        count = 0
        while count < len(keys) and keys[count] in self._by_key:
            count += 1
        queued = self.queued_loads * self._block_bytes
        wanted = count * self._block_bytes
        pays = count and self.costs.loading_pays(count * self._block_size, wanted, queued)
        return keys[:count] if pays else ()

    def claim(self, keys: Sequence[bytes]) -> list[int]:
        """Return the slots of keys that are here; the slots are kept until they are loaded."""
        for key in reversed(keys):  # the end of a prefix is forgotten before its beginning
            self._by_key[key] = self._by_key.pop(key)
        slots = [self._by_key[key] for key in keys]
        self._claimed.update(slots)
        return slots

    def load(self, blocks: Iterable[int], slots: Iterable[int]) -> None:
        """Fill blocks from claimed slots in the step being planned."""
        self._coming.extend(zip(blocks, slots, strict=True))

    def evicted(self, block: int, key: bytes) -> None:
        """Save a block before the planned step writes to it, if it was not saved early."""
        if key in self._by_key:
            self._by_key[key] = self._by_key.pop(key)
            self._overwritten.append(block)
        elif (slot := self._take(key)) is not None:
            self._leaving[block] = slot

    def spoiled(self, key: bytes) -> None:
        """Forget a prefix whose numbers may not be finite."""
        slot = self._by_key.pop(key, None)
        if slot is not None:
            self._free.append(slot)

    def forget(self) -> None:
        """Forget everything."""
        self._by_key.clear()
        self._free = list(range(self.slots))

    def before_writes(self) -> None:
        """End the last step's loads, and save what the planned step overwrites."""
        self.transfers.finish_load()
        self._reading.clear()
        if self._leaving:
            self.transfers.save(list(self._leaving.items()), rested=False)
        self.transfers.await_saved([*self._overwritten, *self._leaving])
        self._leaving.clear()
        self._overwritten.clear()

    def start_loads(self) -> Arrivals | None:
        """Start the loads of the planned step; return them, for the forward pass to wait for."""
        arrivals = self.transfers.load(self._coming) if self._coming else None
        self._reading.update(slot for _, slot in self._coming)
        self._coming.clear()
        self._claimed.clear()
        return arrivals

    def save_early(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Save blocks that will soon be taken back, beside a launched step.

        That step does not wait for the saves.  On a GPU, the step that takes the blocks back hardly
        ever waits either.  The saves take at most a quarter of the slots, so that other prefixes
        are not lost for them.
        """
        found: list[tuple[int, int]] = []
        for block, key in islice(blocks, self.slots // 4):
            if key not in self._by_key and (slot := self._take(key)) is not None:
                found.append((block, slot))
        if found:
            self.transfers.save(found, rested=True)
        self._claimed.clear()

    def _take(self, key: bytes) -> int | None:
        """Return a slot for a prefix that is not here; None where all slots are in use."""
        slot = self._unused()
        if slot is not None:
            self._by_key[key] = slot
            self._claimed.add(slot)
        return slot

    def _unused(self) -> int | None:
        """Return a free slot, or the slot of the least recently used prefix."""
        for index in reversed(range(len(self._free))):
            if not self._is_busy(self._free[index]):
                return self._free.pop(index)
        for key, slot in self._by_key.items():
            if not self._is_busy(slot):
                del self._by_key[key]
                return slot
        return None

    def _is_busy(self, slot: int) -> bool:
        """Whether a planned or running transfer needs the slot."""
        return slot in self._claimed or slot in self._reading
