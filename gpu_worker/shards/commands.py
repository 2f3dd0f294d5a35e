"""The commands of rank 0 to the ranks that follow it, and their answer.

A frame is one command in MessagePack, on the pipe from rank 0 to each follower. Followers answer
those that prepare something with `Done`. All commands but `Load` and `Keep` name a model, by its
index in the order of loading. Hidden states, prompt vectors and sums travel through the collective.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from torch import Tensor

from nightjar.gpu_worker.models import TokenBatch
from nightjar.gpu_worker.models.decode_state import (
    BatchArrays,
    BatchState,
    Seen,
    Shape,
    WindowInput,
)
from nightjar.gpu_worker.models.decode_steps import StepSettings
from nightjar.kernels import (
    Branch,
    BranchLayout,
    ChunkLayout,
    ChunkTensors,
    PagedLayout,
    PagedTensors,
)
from nightjar.kernels.layout import Tables

Ids = bytearray
"""int64 numbers. This type decodes to memory that torch may write to."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load this rank's part of the model in a precision."""

    dtype: str


class Done(msgspec.Struct, frozen=True):
    """The answer to a command.

    error: Why it failed, or None.
    free_bytes: Free memory of the rank's GPU.
    """

    error: str | None = None
    free_bytes: int | None = None


class Keep(msgspec.Struct, frozen=True, tag=True):
    """Make what was loaded last the next model: every rank has its part.

    At the first such command, the ranks connect.
    """


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Make the model's cache."""

    model: int
    blocks: int
    block_size: int
    fp8: bool = False


class Clear(msgspec.Struct, frozen=True, tag=True):
    """Zero these blocks of the cache."""

    model: int
    blocks: list[int]


class Copy(msgspec.Struct, frozen=True, tag=True):
    """Copy blocks of the cache: (source, copy)."""

    model: int
    pairs: list[tuple[int, int]]


class PackedTables(msgspec.Struct, frozen=True, array_like=True):
    """Block tables, concatenated; see kernels.layout.Tables."""

    blocks: Ids
    starts: Ids


class Chunks(msgspec.Struct, frozen=True, array_like=True):
    """A ChunkLayout."""

    tables: PackedTables
    starts: Ids
    ends: Ids
    block_size: int


class Running(msgspec.Struct, frozen=True, array_like=True):
    """A PagedLayout."""

    tables: PackedTables
    lengths: Ids
    block_size: int


class Branches(msgspec.Struct, frozen=True, array_like=True):
    """A BranchLayout; branches: (length, padded, prefix) of each document."""

    tables: PackedTables
    prefix_lengths: Ids
    branches: list[tuple[int, int, int]]


class Forward(msgspec.Struct, frozen=True, tag=True):
    """One step's TokenBatch.

    vectors: Rows of its prompt vectors, which rank 0 broadcasts; 0 where it reads none.
    """

    model: int
    token_ids: Ids
    positions: Ids
    write_blocks: Ids
    write_offsets: Ids
    output_rows: Ids
    prefill: Chunks | None
    decode: Running | None
    branch: Branches | None
    vector_bases: Ids
    vectors: int = 0


class Logits(msgspec.Struct, frozen=True, tag=True):
    """Compute the scores of hidden states, which rank 0 broadcasts."""

    model: int
    rows: int


class TokenNll(msgspec.Struct, frozen=True, tag=True):
    """Compute the scores of targets after hidden states, which rank 0 broadcasts.

    See Decoder.token_nll.
    """

    model: int
    count: int
    rows: Ids
    targets: Ids


class MakeSteps(msgspec.Struct, frozen=True, tag=True):
    """Make what runs the model's windows; see StepSettings."""

    model: int
    token_bytes: list[bytes]
    banned_token_ids: list[int]
    slots: int
    block_size: int
    window_steps: int
    cuda_graphs: bool


class Array(msgspec.Struct, frozen=True, array_like=True):
    """A NumPy array: its dtype's name, its shape, and its bytes in row order."""

    dtype: str
    shape: list[int]
    data: bytearray


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """A BatchState; seen: (slot, prompt, generated) of each Seen."""

    shape: Shape
    arrays: list[Array]
    seen: list[tuple[int, Ids, Ids]]


class Window(msgspec.Struct, frozen=True, tag=True):
    """Run a window of decode steps: see WindowInput. Nothing else is sent until its end."""

    model: int
    steps: int
    tables: Array
    batch: Batch | None


Preparation = Load | Keep | Allocate | MakeSteps
Work = Clear | Copy | Forward | Logits | TokenNll | Window
Command = Preparation | Work

_encoder = msgspec.msgpack.Encoder()
_command: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_done = msgspec.msgpack.Decoder(Done)


def encode(message: Command | Done) -> bytes:
    """Encode one frame."""
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    """Decode a frame of rank 0."""
    return _command.decode(frame)


def decode_done(frame: bytes) -> Done:
    """Decode a frame of a follower."""
    return _done.decode(frame)


def forward_of(model: int, batch: TokenBatch) -> Forward:
    """Return the command that makes another rank compute this batch.

    Raises:
        ValueError: The batch is a step of a window; see `window_of`.
    """
    if (
        batch.output_rows is None
        or isinstance(batch.prefill, ChunkTensors)
        or isinstance(batch.decode, PagedTensors)
    ):
        raise ValueError("a step whose rows are on the device only cannot be told to other ranks")
    return Forward(
        model=model,
        token_ids=ids_of(batch.token_ids),
        positions=ids_of(batch.positions),
        write_blocks=ids_of(batch.write_blocks),
        write_offsets=ids_of(batch.write_offsets),
        output_rows=ids_of(batch.output_rows),
        prefill=_chunks(batch.prefill),
        decode=_running(batch.decode),
        branch=_branches(batch.branch),
        vector_bases=ids_of(batch.vector_bases),
        vectors=0 if batch.prompt_vectors is None else batch.prompt_vectors.shape[0],
    )


def batch_of(command: Forward, device: str) -> TokenBatch:
    """Return the batch of a command, without its prompt vectors."""
    return TokenBatch(
        token_ids=tensor_of(command.token_ids, device),
        positions=tensor_of(command.positions, device),
        vector_bases=tensor_of(command.vector_bases, device),
        prompt_vectors=None,
        write_blocks=tensor_of(command.write_blocks, device),
        write_offsets=tensor_of(command.write_offsets, device),
        prefill=_chunk_layout(command.prefill),
        decode=_paged_layout(command.decode),
        branch=_branch_layout(command.branch),
        output_rows=tensor_of(command.output_rows, device),
    )


def steps_of(model: int, settings: StepSettings) -> MakeSteps:
    """Return the command that makes another rank's decode steps."""
    return MakeSteps(
        model=model,
        token_bytes=list(settings.token_bytes),
        banned_token_ids=list(settings.banned_token_ids),
        slots=settings.slots,
        block_size=settings.block_size,
        window_steps=settings.window_steps,
        cuda_graphs=settings.cuda_graphs,
    )


def settings_of(command: MakeSteps) -> StepSettings:
    """Return the settings of a command."""
    return StepSettings(
        token_bytes=command.token_bytes,
        banned_token_ids=command.banned_token_ids,
        slots=command.slots,
        block_size=command.block_size,
        window_steps=command.window_steps,
        cuda_graphs=command.cuda_graphs,
    )


def window_of(model: int, window: WindowInput) -> Window:
    """Return the command that makes another rank run a window."""
    batch = window.batch
    sent = None
    if batch is not None:
        seen = [(one.slot, _raw(one.prompt), _raw(one.generated)) for one in batch.seen]
        sent = Batch(batch.shape, [_sent(array) for array in batch.arrays], seen)
    return Window(model, window.steps, _sent(window.tables), sent)


def window_input_of(command: Window) -> WindowInput:
    """Return the window of a command."""
    sent = command.batch
    batch = None
    if sent is not None:
        seen = [Seen(slot, _array(prompt), _array(made)) for slot, prompt, made in sent.seen]
        arrays = BatchArrays(*(_received(array) for array in sent.arrays))
        batch = BatchState(sent.shape, arrays, seen)
    return WindowInput(command.steps, _received(command.tables), batch)


def ids_of(tensor: Tensor) -> Ids:
    """Return what is sent of a tensor int64[n]."""
    return _raw(tensor.cpu().numpy())


def tensor_of(ids: Ids, device: str) -> Tensor:
    """Return the tensor int64[n] that was sent."""
    return torch.from_numpy(_array(ids)).to(device)


def _raw(array: np.ndarray) -> Ids:
    if array.dtype != np.int64:
        raise TypeError(f"{array.dtype} numbers in a step's layout, which are int64")
    return bytearray(array.tobytes())


def _array(ids: Ids) -> np.ndarray:
    return np.frombuffer(ids, dtype=np.int64)


def _sent(array: np.ndarray) -> Array:
    return Array(array.dtype.name, list(array.shape), bytearray(array.tobytes()))


def _received(sent: Array) -> np.ndarray:
    return np.frombuffer(sent.data, dtype=sent.dtype).reshape(sent.shape)


def _packed(tables: Tables) -> PackedTables:
    return PackedTables(_raw(tables.blocks), _raw(tables.starts))


def _tables(packed: PackedTables) -> Tables:
    return Tables(_array(packed.blocks), _array(packed.starts))


def _chunks(layout: ChunkLayout | None) -> Chunks | None:
    if layout is None:
        return None
    return Chunks(_packed(layout.tables), _raw(layout.starts), _raw(layout.ends), layout.block_size)


def _running(layout: PagedLayout | None) -> Running | None:
    if layout is None:
        return None
    return Running(_packed(layout.tables), _raw(layout.lengths), layout.block_size)


def _branches(layout: BranchLayout | None) -> Branches | None:
    if layout is None:
        return None
    branches = [(one.length, one.padded, one.prefix) for one in layout.branches]
    return Branches(_packed(layout.tables), _raw(layout.prefix_lengths), branches)


def _chunk_layout(sent: Chunks | None) -> ChunkLayout | None:
    if sent is None:
        return None
    return ChunkLayout(
        _tables(sent.tables), _array(sent.starts), _array(sent.ends), sent.block_size
    )


def _paged_layout(sent: Running | None) -> PagedLayout | None:
    if sent is None:
        return None
    return PagedLayout(_tables(sent.tables), _array(sent.lengths), sent.block_size)


def _branch_layout(sent: Branches | None) -> BranchLayout | None:
    if sent is None:
        return None
    branches = tuple(Branch(length, padded, prefix) for length, padded, prefix in sent.branches)
    return BranchLayout(_tables(sent.tables), _array(sent.prefix_lengths), branches)
