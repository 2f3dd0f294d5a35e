"""Cache blocks to the host's memory and back: at once, or on streams beside what is computed."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nightjar import kernels
from nightjar.gpu_worker.models import Arrivals, KVTensors

Pairs = Sequence[tuple[int, int]]
"""Blocks of the cache, each with its slot in the host's memory; none of either twice."""

Observer = Callable[[int, float], None]
"""Is told bytes and seconds of a transfer."""


class Transfers(Protocol):
    """Moves blocks.  What is asked for happens in the order of the calls."""

    memory: HostMemory

    def save(self, pairs: Pairs, *, rested: bool) -> None:
        """Copy blocks to their slots, as they are now; rested: as they were at the last
        `finish_load`."""

    def await_saved(self, blocks: Iterable[int]) -> None:
        """Let what is computed from now on overwrite these blocks."""

    def load(self, pairs: Pairs) -> Arrivals:
        """Copy slots to their blocks, layer by layer; nobody may use these blocks meanwhile."""

    def finish_load(self) -> None:
        """Let what is computed from now on find all that was loaded."""


def transfers(cache: KVTensors, slots: int, observe: Observer) -> Transfers:
    """What moves this cache's blocks, with memory for so many of them."""
    return (StreamTransfers if cache.keys.is_cuda else DirectTransfers)(cache, slots, observe)


class DirectTransfers:
    """On the CPU.  A layer is loaded just before it is first read."""

    def __init__(self, cache: KVTensors, slots: int, observe: Observer) -> None:
        self.memory = HostMemory(cache, slots)
        self._observe = observe
        self._loading: _LayerByLayer | None = None

    def save(self, pairs: Pairs, *, rested: bool) -> None:
        """At once."""
        started = time.perf_counter()
        self.memory.save(*self.memory.indices(pairs))
        self._observe(len(pairs) * self.memory.block_bytes, time.perf_counter() - started)

    def await_saved(self, blocks: Iterable[int]) -> None:
        """They are."""

    def load(self, pairs: Pairs) -> Arrivals:
        """When asked for."""
        self._loading = _LayerByLayer(self.memory, pairs, self._observe)
        return self._loading

    def finish_load(self) -> None:
        """What was not asked for (a step failed, or had no row left) is loaded now."""
        if self._loading is not None:
            self._loading.wait(-1)
        self._loading = None


class _LayerByLayer:
    """A load that is done as far as it was waited for."""

    def __init__(self, memory: HostMemory, pairs: Pairs, observe: Observer) -> None:
        self.memory = memory
        self._indices = memory.indices(pairs)
        self._bytes = len(pairs) * memory.block_bytes
        self._observe = observe
        self._done = 0
        self._seconds = 0.0

    def wait(self, layer: int) -> None:
        """Load up to this layer."""
        if self._done == self.memory.layers:
            return
        started = time.perf_counter()
        for index in range(self._done, layer % self.memory.layers + 1):
            self.memory.load_layer(index, *self._indices)
            self._done = index + 1
        self._seconds += time.perf_counter() - started
        if self._done == self.memory.layers:
            self._observe(self._bytes, self._seconds)


class StreamTransfers:
    """On a GPU: a stream in each direction, and events between them and what is computed.

    Everything else runs on the current stream.  Transfers wait for what was asked of it before;
    it waits for them where it is told to.
    """

    def __init__(self, cache: KVTensors, slots: int, observe: Observer) -> None:
        self.memory = HostMemory(cache, slots)
        self._observe = observe
        self._out, self._in = (torch.cuda.Stream(cache.keys.device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._leaving: dict[int, torch.cuda.Event] = {}
        self._last_use: dict[int, torch.cuda.Event] = {}  # of a slot, on either stream
        self._loading: _Events | None = None
        self._rested: torch.cuda.Event | None = None
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()

    def save(self, pairs: Pairs, *, rested: bool) -> None:
        """Behind what is computed now, and beside what comes after it; rested: beside that, too."""
        begin = self._begin(self._out, pairs, self._rested if rested else None)
        end = _timing_event()
        with torch.cuda.stream(self._out):
            self.memory.save(*self.memory.indices(pairs))
            end.record()
        self._leaving.update(dict.fromkeys((block for block, _ in pairs), end))
        self._ended(begin, end, pairs)

    def await_saved(self, blocks: Iterable[int]) -> None:
        """The current stream waits; nothing, where the copies were made long ago."""
        found = [self._leaving.pop(block, None) for block in blocks]
        for event in dict.fromkeys(found):
            if event is not None:
                torch.cuda.current_stream().wait_event(event)

    def load(self, pairs: Pairs) -> Arrivals:
        """Behind what is computed now; the layers are waited for one by one."""
        begin = self._begin(self._in, pairs)
        landed = []
        with torch.cuda.stream(self._in):
            indices = self.memory.indices(pairs)
            for layer in range(self.memory.layers):
                self.memory.load_layer(layer, *indices)
                landed.append(_timing_event())
                landed[-1].record()
        self._ended(begin, landed[-1], pairs)
        self._loading = _Events(landed)
        return self._loading

    def finish_load(self) -> None:
        """The current stream waits, if no step has let it do so; the host takes in the times."""
        if self._loading is not None:
            self._loading.wait(-1)
        self._loading = None
        self._rested = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._rested.record()
        while self._timed and self._timed[0][1].query():  # type: ignore[no-untyped-call]
            begin, end, bytes_ = self._timed.popleft()
            self._observe(bytes_, begin.elapsed_time(end) / 1e3)

    def _begin(
        self, stream: torch.cuda.Stream, pairs: Pairs, after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event:
        """Let a transfer on the stream wait for an event, or for all that is computed now; and for
        the slots."""
        if after is None:
            stream.wait_stream(torch.cuda.current_stream())
        else:
            stream.wait_event(after)
        for event in dict.fromkeys(self._last_use.get(slot) for _, slot in pairs):
            if event is not None:
                stream.wait_event(event)
        begin = _timing_event()
        begin.record(stream)
        return begin

    def _ended(self, begin: torch.cuda.Event, end: torch.cuda.Event, pairs: Pairs) -> None:
        """Remember when the slots are free for another transfer, and what to time."""
        self._last_use.update(dict.fromkeys((slot for _, slot in pairs), end))
        self._timed.append((begin, end, len(pairs) * self.memory.block_bytes))


class _Events:
    """A load on a stream."""

    def __init__(self, landed: Sequence[torch.cuda.Event]) -> None:
        self._landed = landed

    def wait(self, layer: int) -> None:
        """The current stream waits."""
        torch.cuda.current_stream().wait_event(self._landed[layer])


class HostMemory:
    """Slots of one block each in the host's memory, all layers of a block side by side.

    packed: [slots, layers, 2, ...], the keys and the values of each layer.
    """

    def __init__(self, cache: KVTensors, slots: int) -> None:
        self._cache = cache
        self.layers, _, *block = cache.keys.shape
        shape = (slots, self.layers, 2, *block)
        self.packed = torch.empty(shape, dtype=cache.keys.dtype)
        self.block_bytes = self.packed[0].numel() * self.packed.element_size()
        if cache.keys.is_cuda:
            weakref.finalize(self, _unpin, _pin(self.packed), cache.keys.device)

    def save(self, blocks: Tensor, slots: Tensor) -> None:
        """Copy blocks to slots."""
        kernels.kv_pack(self._cache.keys, self._cache.values, blocks, self.packed, slots)

    def load_layer(self, layer: int, blocks: Tensor, slots: Tensor) -> None:
        """Copy one layer of slots to blocks."""
        one = slice(layer, layer + 1)
        keys, values = self._cache.keys[one], self._cache.values[one]
        kernels.kv_unpack(keys, values, blocks, self.packed[:, one], slots)

    def indices(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Blocks and slots, int64[n] each, beside the cache; the host does not wait for them."""
        index = torch.tensor(pairs).T.contiguous()
        blocks, slots = kernels.upload(index, self._cache.keys.device).unbind(0)
        return blocks, slots


def _pin(memory: Tensor) -> int:
    """Lock memory into its place; returns its address, to be unlocked by.

    Not torch's own pinned memory, which is rounded up to the next power of two: up to twice the
    budget.

    Raises:
        MemoryError: The system does not allow so much.
    """
    address, bytes_ = memory.data_ptr(), memory.numel() * memory.element_size()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(runtime.cudaHostRegister(address, bytes_, 0))
    if status:
        raise MemoryError(
            f"{bytes_} bytes of the host's memory cannot be pinned (CUDA error {status}): lower "
            "NIGHTJAR_HOST_CACHE_BYTES or raise the limit on locked memory (ulimit -l)"
        )
    return address


def _unpin(address: int, device: torch.device) -> None:
    """Let memory go, when no kernel has it any more: a copy is hardly ever waited for by the host,
    and CUDA does not say that unlocking does so."""
    try:
        torch.cuda.synchronize(device)
    finally:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
