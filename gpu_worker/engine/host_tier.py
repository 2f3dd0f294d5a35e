"""Prefixes that the cache had no room for, in the host's memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from nightjar.gpu_worker.engine.load_costs import LoadCosts
from nightjar.gpu_worker.engine.transfers import Transfers
from nightjar.gpu_worker.models import Arrivals


class HostTier:
    """A fixed number of slots of a block each, by the keys of the prefixes; the least recently used
    goes first.

    A prefix comes here when the pool takes back the block that it fills, or shortly before.  Such a
    block was held only by requests that ended well: what is here is finite.  It stays when it is
    loaded, so that it need not be saved again.  What a step saves and loads is collected while the
    step is planned, and happens before it writes: first what leaves, then what comes.
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
        # Of the step being planned: blocks and their slots, and blocks whose saving must be over.
        self._leaving: dict[int, int] = {}
        self._coming: list[tuple[int, int]] = []
        self._overwritten: list[int] = []
        # Slots that are written or read by what is planned or under way.
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
        """The first of these keys that are here without a gap, if loading beats computing them."""
        count = 0
        while count < len(keys) and keys[count] in self._by_key:
            count += 1
        queued = self.queued_loads * self._block_bytes
        wanted = count * self._block_bytes
        pays = count and self.costs.loading_pays(count * self._block_size, wanted, queued)
        return keys[:count] if pays else ()

    def claim(self, keys: Sequence[bytes]) -> list[int]:
        """The slots of keys that are here; they stay as they are until they are loaded."""
        for key in reversed(keys):  # the ends of a prefix are forgotten before its beginning
            self._by_key[key] = self._by_key.pop(key)
        slots = [self._by_key[key] for key in keys]
        self._claimed.update(slots)
        return slots

    def load(self, blocks: Iterable[int], slots: Iterable[int]) -> None:
        """Fill blocks from claimed slots in the step being planned."""
        self._coming.extend(zip(blocks, slots, strict=True))

    def evicted(self, block: int, key: bytes) -> None:
        """Save a block before the step that is planned writes to it, if it was not saved ahead."""
        if key in self._by_key:
            self._by_key[key] = self._by_key.pop(key)
            self._overwritten.append(block)
        elif (slot := self._take(key)) is not None:
            self._leaving[block] = slot

    def spoiled(self, key: bytes) -> None:
        """Forget a prefix of which no finite scores vouch for what it is now."""
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
        """Load what the planned step reads; what comes before the step's forward pass is over."""
        arrivals = self.transfers.load(self._coming) if self._coming else None
        self._reading.update(slot for _, slot in self._coming)
        self._coming.clear()
        self._claimed.clear()
        return arrivals

    def save_ahead(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Save blocks that soon make room for others, beside a step that was launched: it does not
        wait for it, and on a GPU the one that needs the room hardly ever has to.

        They take no more than a quarter of the slots, so that the others are not lost for it.
        """
        found: list[tuple[int, int]] = []
        for block, key in islice(blocks, self.slots // 4):
            if key not in self._by_key and (slot := self._take(key)) is not None:
                found.append((block, slot))
        if found:
            self.transfers.save(found, rested=True)
        self._claimed.clear()

    def _take(self, key: bytes) -> int | None:
        """A slot for a prefix that is not here; None where all of them are in use."""
        slot = self._unused()
        if slot is not None:
            self._by_key[key] = slot
            self._claimed.add(slot)
        return slot

    def _unused(self) -> int | None:
        """A free slot, or that of the least recently used prefix."""
        for index in reversed(range(len(self._free))):
            if not self._is_busy(self._free[index]):
                return self._free.pop(index)
        for key, slot in self._by_key.items():
            if not self._is_busy(slot):
                del self._by_key[key]
                return slot
        return None

    def _is_busy(self, slot: int) -> bool:
        """Whether what is planned or under way needs the slot as it is."""
        return slot in self._claimed or slot in self._reading
