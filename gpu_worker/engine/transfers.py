"""Moves cache blocks to the host's memory and back: at once, or on streams beside computation."""

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
"""Cache blocks, each with its slot in the host's memory; no block and no slot twice."""

Observer = Callable[[int, float], None]
"""Takes bytes and seconds of a transfer."""


class Transfers(Protocol):
    """Moves blocks, in the order of the calls."""

    memory: HostMemory

    def save(self, pairs: Pairs, *, rested: bool) -> None:
        """Copy blocks to their slots as they are now, or if rested, as they were at the last
        `finish_load`."""

    def await_saved(self, blocks: Iterable[int]) -> None:
        """Make later computation wait for the saves of these blocks, which it overwrites."""

    def load(self, pairs: Pairs) -> Arrivals:
        """Copy slots to their blocks, layer by layer; the blocks must not be used meanwhile."""

    def finish_load(self) -> None:
        """Make later computation wait for all loads."""


def transfers(cache: KVTensors, slots: int, observe: Observer) -> Transfers:
    """Return the transfers of this cache's blocks, with host memory for so many slots."""
    return (StreamTransfers if cache.keys.is_cuda else DirectTransfers)(cache, slots, observe)


class DirectTransfers:
    """Transfers on the CPU.  A layer is loaded just before it is first read."""

    def __init__(self, cache: KVTensors, slots: int, observe: Observer) -> None:
        self.memory = HostMemory(cache, slots)
        self._observe = observe
        self._loading: _LayerByLayer | None = None

    def save(self, pairs: Pairs, *, rested: bool) -> None:
        """Copy blocks to their slots at once."""
        started = time.perf_counter()
        self.memory.save(*self.memory.indices(pairs))
        self._observe(len(pairs) * self.memory.block_bytes, time.perf_counter() - started)

    def await_saved(self, blocks: Iterable[int]) -> None:
        """No-op: on the CPU, saves are complete when `save` returns."""

    def load(self, pairs: Pairs) -> Arrivals:
        """Return the loads; a layer is loaded when it is waited for."""
        self._loading = _LayerByLayer(self.memory, pairs, self._observe)
        return self._loading

    def finish_load(self) -> None:
        """Load the layers that no step waited for, because it failed or had no rows left."""
        if self._loading is not None:
            self._loading.wait(-1)
        self._loading = None


class _LayerByLayer:
    """A load that copies a layer when it is waited for."""

    def __init__(self, memory: HostMemory, pairs: Pairs, observe: Observer) -> None:
        self.memory = memory
        self._indices = memory.indices(pairs)
        self._bytes = len(pairs) * memory.block_bytes
        self._observe = observe
        self._done = 0
        self._seconds = 0.0

    def wait(self, layer: int) -> None:
        """Load all layers up to this one."""
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
    """Transfers on a GPU: a stream in each direction, with events between them and computation.

    Computation runs on the current stream.  Transfers wait for the work that was queued on it
    before them.  It waits for them only in `await_saved`, `wait` and `finish_load`.
    """

    def __init__(self, cache: KVTensors, slots: int, observe: Observer) -> None:
        self.memory = HostMemory(cache, slots)
        self._observe = observe
        self._out, self._in = (torch.cuda.Stream(cache.keys.device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._leaving: dict[int, torch.cuda.Event] = {}
        self._last_use: dict[
            int, torch.cuda.Event
        ] = {}  # the last use of each slot, on either stream
        self._loading: _Events | None = None
        self._rested: torch.cuda.Event | None = None
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()

    def save(self, pairs: Pairs, *, rested: bool) -> None:
        """Copy blocks after the computation queued so far; rested blocks need not wait for it."""
        begin = self._begin(self._out, pairs, self._rested if rested else None)
        end = _timing_event()
        with torch.cuda.stream(self._out):
            self.memory.save(*self.memory.indices(pairs))
            end.record()
        self._leaving.update(dict.fromkeys((block for block, _ in pairs), end))
        self._ended(begin, end, pairs)

    def await_saved(self, blocks: Iterable[int]) -> None:
        """Make the current stream wait for the saves; a save that is complete costs nothing."""
        found = [self._leaving.pop(block, None) for block in blocks]
        for event in dict.fromkeys(found):
            if event is not None:
                torch.cuda.current_stream().wait_event(event)

    def load(self, pairs: Pairs) -> Arrivals:
        """Start loads after the computation queued so far; each layer is waited for by itself."""
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
        """Make the current stream wait, if no step has done so; the host reads the times."""
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
        """Make a transfer on the stream wait for its slots, and for an event or all queued work."""
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
        """Note when the slots are free for another transfer, and what to time."""
        self._last_use.update(dict.fromkeys((slot for _, slot in pairs), end))
        self._timed.append((begin, end, len(pairs) * self.memory.block_bytes))


class _Events:
    """A load on a stream."""

    def __init__(self, landed: Sequence[torch.cuda.Event]) -> None:
        self._landed = landed

    def wait(self, layer: int) -> None:
        """Make the current stream wait."""
        torch.cuda.current_stream().wait_event(self._landed[layer])


class HostMemory:
    """Slots of one block each in the host's memory, all layers of a block side by side.

    packed: [slots, layers, 2, ...], the keys and the values of each layer, and for a cache in FP8
    their scales in a second tensor of that form.
    """

    def __init__(self, cache: KVTensors, slots: int) -> None:
        self._cache = cache
        self.layers = cache.keys.shape[0]
        self.packed = [_slots(keys, slots) for keys, _ in cache.pairs]
        self.block_bytes = sum(x[0].numel() * x.element_size() for x in self.packed)
        if cache.keys.is_cuda:
            for packed in self.packed:
                weakref.finalize(self, _unpin, _pin(packed), cache.keys.device)

    def save(self, blocks: Tensor, slots: Tensor) -> None:
        """Copy blocks to slots."""
        for (keys, values), packed in zip(self._cache.pairs, self.packed, strict=True):
            kernels.kv_pack(keys, values, blocks, packed, slots)

    def load_layer(self, layer: int, blocks: Tensor, slots: Tensor) -> None:
        """Copy one layer of slots to blocks."""
        one = slice(layer, layer + 1)
        for (keys, values), packed in zip(self._cache.pairs, self.packed, strict=True):
            kernels.kv_unpack(keys[one], values[one], blocks, packed[:, one], slots)

    def indices(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Return blocks and slots, int64[n] each, on the cache's device; the host does not wait."""
        index = torch.tensor(pairs).T.contiguous()
        blocks, slots = kernels.upload(index, self._cache.keys.device).unbind(0)
        return blocks, slots


def _slots(cache: Tensor, slots: int) -> Tensor:
    """Make host memory for blocks of a cache [layers, blocks, ...]: [slots, layers, 2, ...]."""
    layers, _, *block = cache.shape
    return torch.empty((slots, layers, 2, *block), dtype=cache.dtype)


def _pin(memory: Tensor) -> int:
    """Pin host memory; return its address, by which it is unpinned.

    torch's own pinned memory is rounded up to the next power of two: up to twice the budget.

    Raises:
        MemoryError: The system does not allow so much pinned memory.
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
    """Unpin memory after the GPU has finished its work.

    The host hardly ever waits for a copy, and CUDA does not promise that unpinning does.
    """
    try:
        torch.cuda.synchronize(device)
    finally:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
