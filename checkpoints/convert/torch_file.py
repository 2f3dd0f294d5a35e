"""Opens a file of `torch.save`: a zip archive, or the format before PyTorch 1.6.

The pickle within is read by `pickles.py`, which runs nothing of it.  Weights stay in the file.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nightjar.checkpoints.convert.arrays import NUMPY_DTYPES, StoredArray
from nightjar.checkpoints.convert.pickles import (
    StorageReference,
    TensorReference,
    read_pickle,
)
from nightjar.checkpoints.errors import CheckpointError
from nightjar.checkpoints.safetensors_header import ITEM_BITS

MAX_PICKLE_BYTES = 1 << 30
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip entry: signature, lengths of name and extra


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A file's object, and where each of its storages begins."""

    path: Path
    value: Any
    _offsets: Mapping[str, int]

    def array(self, reference: TensorReference, label: str) -> StoredArray:
        """Return a tensor as an array of the file.

        Raises:
            CheckpointError: The tensor reaches beyond its storage, or is no floating point.
        """
        storage = reference.storage
        offset = self._offsets.get(storage.key)
        reach = 1 + sum(
            (size - 1) * step for size, step in zip(reference.shape, reference.strides, strict=True)
        )
        if math.prod(reference.shape) == 0:
            reach = 0
        item_bytes = ITEM_BITS[reference.dtype] // 8
        room = storage.count * ITEM_BITS[storage.dtype] // 8
        if offset is None or (reference.offset + reach) * item_bytes > room:
            raise CheckpointError(
                f"{self.path}: {label} reaches beyond its storage; copy the file again"
            )
        if reference.dtype not in NUMPY_DTYPES:
            raise CheckpointError(f"{self.path}: {label} is stored as {reference.dtype}")
        return StoredArray(
            self.path,
            offset + reference.offset * item_bytes,
            reference.dtype,
            reference.shape,
            reference.strides,
            label,
        )


def open_torch_file(path: Path, begin: int = 0, length: int | None = None) -> TorchFile:
    """Open a file, or the part of it that begins at a byte and has a length.

    Raises:
        CheckpointError: It is no file of torch.save, or a damaged one.
    """
    try:
        with path.open("rb") as raw:
            if length is None:
                length = path.stat().st_size - begin
            raw.seek(begin)
            head = raw.read(4)
            raw.seek(begin)
            if head == b"PK\x03\x04":
                return _open_zip(path, raw, begin, length)
            if head[:1] == b"\x80" and begin == 0:
                return _open_legacy(path, raw)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    raise CheckpointError(
        f"{path}: not a file of torch.save; expected a zip archive or a pickle of PyTorch"
    )


class _Part(io.RawIOBase):
    """A part of a file, as a file of its own."""

    def __init__(self, raw: IO[bytes], begin: int, length: int) -> None:
        self._raw, self._begin, self._length, self._at = raw, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - any writable buffer
        self._raw.seek(self._begin + self._at)
        data = self._raw.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _open_zip(path: Path, raw: IO[bytes], begin: int, length: int) -> TorchFile:
    try:
        with zipfile.ZipFile(io.BufferedReader(_Part(raw, begin, length))) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            pickled = [name for name in entries if name.endswith("/data.pkl")]
            if len(pickled) != 1:
                raise CheckpointError(f"{path}: a zip archive that torch.save did not write")
            root = pickled[0].removesuffix("data.pkl")
            if entries[pickled[0]].file_size > MAX_PICKLE_BYTES:
                raise CheckpointError(f"{path}: its pickle is larger than 1 GiB")
            order = f"{root}byteorder"
            if order in entries and archive.read(order).strip() != b"little":
                raise CheckpointError(f"{path}: its numbers are big-endian; save it on x86 or ARM")
            data = archive.read(pickled[0])
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise CheckpointError(f"{path}: truncated or damaged: {error}; copy it again") from error
    value, storages = read_pickle(io.BytesIO(data), str(path))
    offsets = {
        key: begin + _entry_offset(path, raw, begin, entries.get(f"{root}data/{key}"), storage)
        for key, storage in storages.items()
    }
    return TorchFile(path, value, offsets)


def _entry_offset(
    path: Path,
    raw: IO[bytes],
    begin: int,
    entry: zipfile.ZipInfo | None,
    storage: StorageReference,
) -> int:
    """Return where an entry's bytes begin within the archive."""
    size = storage.count * ITEM_BITS[storage.dtype] // 8
    if entry is None or entry.compress_type != zipfile.ZIP_STORED or entry.file_size < size:
        raise CheckpointError(
            f"{path}: storage {storage.key} is missing, compressed or too short; copy the file "
            "again"
        )
    raw.seek(begin + entry.header_offset)
    header = raw.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
        raise CheckpointError(f"{path}: truncated or damaged at storage {storage.key}")
    _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    return int(entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes)


def _open_legacy(path: Path, raw: IO[bytes]) -> TorchFile:
    """Open the format before PyTorch 1.6: five pickles, then each storage after its size."""
    where = str(path)
    magic, _ = read_pickle(raw, where)
    if magic != LEGACY_MAGIC or read_pickle(raw, where)[0] != LEGACY_PROTOCOL:
        raise CheckpointError(f"{path}: a pickle that torch.save did not write")
    system, _ = read_pickle(raw, where)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise CheckpointError(f"{path}: its numbers are big-endian; save it on x86 or ARM")
    value, storages = read_pickle(raw, where)
    keys, _ = read_pickle(raw, where)
    if not isinstance(keys, list) or {str(key) for key in keys} != set(storages):
        raise CheckpointError(f"{path}: its list of storages is damaged; copy the file again")
    offsets: dict[str, int] = {}
    size = path.stat().st_size
    for key in map(str, keys):
        storage = storages[key]
        count = int.from_bytes(raw.read(8), "little")
        offsets[key] = raw.tell()
        end = offsets[key] + count * ITEM_BITS[storage.dtype] // 8
        if count != storage.count or end > size:
            raise CheckpointError(f"{path}: truncated or damaged at storage {key}; copy it again")
        raw.seek(end)
    return TorchFile(path, value, offsets)
