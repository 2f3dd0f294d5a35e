"""Arrays that lie in files, and tensors that are put together from their rows.

Nothing here interprets a number: 16-bit floats are moved as they are.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nightjar.checkpoints.errors import CheckpointError

Array = npt.NDArray[Any]

# How a dtype of safetensors is held in memory.  NumPy has no bfloat16: its bits are kept.
NUMPY_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
}
BLOCK_BYTES = 1 << 20
"""At most so many bytes of a source, or one row, are read at once: they stay in the cache."""
_TILE = 256
"""A matrix is transposed in tiles of so many rows and columns: three times as fast as whole."""
# The bits of the exponent: all of them are set in an infinity and in a NaN.
_EXPONENT_BITS = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Numbers in a file: dtype as safetensors names it, offset in bytes, strides in elements."""

    path: Path
    offset_bytes: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    label: str

    def __post_init__(self) -> None:
        if self.dtype not in NUMPY_DTYPES:
            raise CheckpointError(
                f"{self.path}: {self.label} is stored as {self.dtype}: expected one of "
                f"{', '.join(NUMPY_DTYPES)}"
            )

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return int(np.dtype(NUMPY_DTYPES[self.dtype]).itemsize)

    @property
    def span(self) -> tuple[Path, int, int]:
        """The file, and the offsets of the first byte and of the one after the last."""
        sizes = zip(self.shape, self.strides, strict=True)
        reach = 1 + sum((size - 1) * step for size, step in sizes)
        return self.path, self.offset_bytes, self.offset_bytes + reach * self.item_bytes

    def read(self, rows: slice, columns: slice = slice(None)) -> Array:
        """Read a block of rows and columns (of a vector: its numbers).

        Raises:
            CheckpointError: The file ends before them, or cannot be read.
        """
        parts = [part.indices(size) for part, size in zip((rows, columns), self.shape)]  # noqa: B905
        shape = tuple(stop - start for start, stop, _ in parts)
        first = sum(part[0] * step for part, step in zip(parts, self.strides, strict=True))
        reach = 1 + sum((size - 1) * step for size, step in zip(shape, self.strides, strict=True))
        count = reach if math.prod(shape) else 0
        begin = self.offset_bytes + first * self.item_bytes
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(begin)
                flat = np.empty(count, NUMPY_DTYPES[self.dtype])
                _read_into(file, memoryview(flat.data).cast("B"))
        except (OSError, EOFError) as error:
            raise CheckpointError(
                f"{self.path}: {self.label} cannot be read ({error or 'the file ends before it'}); "
                "copy the file again"
            ) from error
        steps = [step * self.item_bytes for step in self.strides]
        return np.lib.stride_tricks.as_strided(flat, shape, steps)


def _read_into(file: io.FileIO, buffer: memoryview) -> None:
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise EOFError
        buffer = buffer[count:]


@dataclass(frozen=True, slots=True)
class Run:
    """Rows start, start + step, ... of a source become rows to, to + 1, ... of a tensor."""

    start: int
    count: int
    to: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """What a tensor takes from one stored array; column: the tensor's first column of it."""

    stored: StoredArray
    runs: tuple[Run, ...]
    column: int = 0


@dataclass(frozen=True, slots=True)
class Recipe:
    """A tensor of the target, put together when it is written.

    name: in the target.  shape: as written.
    transposed: the pieces describe [out, in], and the tensor is written as [in, out].
    equal: pieces that hold the same numbers, such as those of other ranks.
    add_one: one is added, because the source keeps a norm's weights less one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    transposed: bool = False
    equal: tuple[Piece, ...] = ()
    add_one: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * int(np.dtype(NUMPY_DTYPES[self.dtype]).itemsize)

    @property
    def spans(self) -> set[tuple[Path, int, int]]:
        """The parts of files that it is made of."""
        return {piece.stored.span for piece in (*self.pieces, *self.equal)}

    def check(self) -> None:
        """Raise unless the pieces fill the tensor exactly."""
        shape = self.shape[::-1] if self.transposed else self.shape
        width = math.prod(shape[1:])
        filled = sum(
            run.count * math.prod(piece.stored.shape[1:])
            for piece in self.pieces
            for run in piece.runs
        )
        if filled != shape[0] * width:
            sources = ", ".join(str(list(piece.stored.shape)) for piece in self.pieces)
            raise CheckpointError(
                f"{self.pieces[0].stored.path}: {self.pieces[0].stored.label} has the shapes "
                f"{sources} in its shards, which do not make {list(shape)}; the arguments of the "
                "checkpoint do not belong to these weights"
            )

    def build(self) -> Array:
        """Read and return the tensor.

        Raises:
            CheckpointError: A source is cut short, holds NaN or infinity, or differs from the
                same tensor of another rank.
        """
        built = np.empty(self.shape, NUMPY_DTYPES[self.dtype])
        target = built.T if self.transposed else built
        for piece in self.pieces:
            _copy(piece, self.dtype, target)
        if self.add_one:
            built = _plus_one(built, self.dtype)
        for other in self.equal:
            self._compare(target, other)
        return built

    def _compare(self, target: Array, other: Piece) -> None:
        for run in other.runs:
            for rows, columns in _blocks(other.stored, run):
                found = other.stored.read(_source_rows(run, rows), columns)[:: run.step]
                to = slice(run.to + rows.start, run.to + rows.stop)
                ours = target[to] if found.ndim == 1 else target[to, columns]
                if not np.array_equal(cast(found, other.stored.dtype, self.dtype), ours):
                    raise CheckpointError(
                        f"{other.stored.path}: {other.stored.label} differs from the same tensor "
                        f"of {self.pieces[0].stored.path}; the files do not belong to one "
                        "checkpoint"
                    )


def _blocks(stored: StoredArray, run: Run) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of a run, as rows of the run and columns, that are contiguous in the file."""
    width = math.prod(stored.shape[1:])
    if len(stored.shape) > 1 and stored.strides[-1] != 1:  # stored column by column
        step = max(1, BLOCK_BYTES // (run.count * run.step * stored.item_bytes))
        for column in range(0, width, step):
            yield slice(0, run.count), slice(column, min(width, column + step))
        return
    step = max(1, BLOCK_BYTES // max(1, width * run.step * stored.item_bytes))
    for row in range(0, run.count, step):
        yield slice(row, min(run.count, row + step)), slice(0, width)


def _source_rows(run: Run, rows: slice) -> slice:
    """Return the rows of the source that hold these rows of a run, and those between."""
    last = run.start + (rows.stop - 1) * run.step
    return slice(run.start + rows.start * run.step, last + 1)


def _copy(piece: Piece, dtype: str, target: Array) -> None:
    """Copy the runs of a piece into a tensor, block by block."""
    stored = piece.stored
    for run in piece.runs:
        for rows, columns in _blocks(stored, run):
            found = stored.read(_source_rows(run, rows), columns)[:: run.step]
            _check_finite(found, stored)
            to = slice(run.to + rows.start, run.to + rows.stop)
            values = cast(found, stored.dtype, dtype)
            if found.ndim == 1:
                target[to] = values
            else:
                first = piece.column + columns.start
                _assign(target[to, first : first + values.shape[1]], values)


def _assign(target: Array, rows: Array) -> None:
    """Copy a matrix; where one is transposed, in tiles that stay in the processor's cache."""
    if (target.strides[-1] == target.itemsize) == (rows.strides[-1] == rows.itemsize):
        target[...] = rows
        return
    for row in range(0, rows.shape[0], _TILE):
        for column in range(0, rows.shape[1], _TILE):
            tile = slice(row, row + _TILE), slice(column, column + _TILE)
            target[tile] = rows[tile]


def _check_finite(rows: Array, stored: StoredArray) -> None:
    kind, mask = _EXPONENT_BITS[stored.dtype]
    bits = np.ascontiguousarray(rows.T if rows.strides[-1] != rows.itemsize else rows).view(kind)
    if bool(np.any((bits & kind(mask)) == kind(mask))):
        raise CheckpointError(
            f"{stored.path}: {stored.label} holds NaN or infinity; the training went wrong "
            "before this checkpoint: convert an earlier one"
        )


def cast(values: Array, dtype: str, to: str) -> Array:
    """Return values of one dtype in another, rounded to the nearest, ties to even.

    Raises:
        CheckpointError: A value is too large for FP16.
    """
    if dtype == to:
        return values
    if dtype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if to == "BF16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        made = values.astype(NUMPY_DTYPES[to])
    if not np.isfinite(made).all():
        raise CheckpointError(f"a weight is too large for {to}; use BF16 or F32")
    return made


def _plus_one(values: Array, dtype: str) -> Array:
    return cast(cast(values, dtype, "F64") + 1.0, "F64", dtype)


def rows_in_order(arrays: Sequence[StoredArray], limit: int | None = None) -> tuple[Piece, ...]:
    """Return pieces that put arrays one below the other, as far as `limit` rows go."""
    pieces, to = [], 0
    for stored in arrays:
        count = stored.shape[0] if limit is None else min(stored.shape[0], limit - to)
        if count > 0:
            pieces.append(Piece(stored, (Run(0, count, to),)))
            to += count
    return tuple(pieces)


def columns_in_order(arrays: Sequence[StoredArray]) -> tuple[Piece, ...]:
    """Return pieces that put matrices side by side."""
    pieces, column = [], 0
    for stored in arrays:
        pieces.append(Piece(stored, (Run(0, stored.shape[0], 0),), column))
        column += stored.shape[1]
    return tuple(pieces)
