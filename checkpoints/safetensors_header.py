"""Checks a safetensors file by its header, without reading its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from nightjar.checkpoints.errors import CheckpointError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

ITEM_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """One file: its size, its raw header and its tensors (name -> dtype, shape)."""

    path: Path
    size_bytes: int
    raw: bytes
    tensors: dict[str, tuple[str, tuple[int, ...]]]

    @staticmethod
    def read(path: Path) -> SafetensorsHeader:
        """Read and check the header against the file's size; CheckpointError if they differ."""
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(LENGTH_BYTES), "little")
                if size < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                    raise _damaged(path, f"a header of {length} bytes in a file of {size}")
                raw = file.read(length)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        tensors, data_bytes = _parse(path, raw)
        expected = LENGTH_BYTES + length + data_bytes
        if size != expected:
            raise _damaged(path, f"{size} bytes, but its header describes {expected}")
        return SafetensorsHeader(path, size, raw, tensors)

    def spans(self) -> dict[str, tuple[int, int]]:
        """The offsets in the file of each tensor's first byte, and of the one after its last."""
        data = LENGTH_BYTES + len(self.raw)
        entries = json.loads(self.raw)  # checked when it was read
        return {
            name: (data + entries[name]["data_offsets"][0], data + entries[name]["data_offsets"][1])
            for name in self.tensors
        }


def _parse(path: Path, raw: bytes) -> tuple[dict[str, tuple[str, tuple[int, ...]]], int]:
    """Return a header's tensors, and how many bytes of data they cover without gap or overlap."""
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    tensors, spans = {}, []
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(path, name, entry)
        tensors[name] = (dtype, shape)
        spans.append((begin, end))
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise _damaged(path, f"its tensors leave a gap or overlap at byte {position}")
        position = end
    return tensors, position


def _entry(path: Path, name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    """Return one tensor's dtype, shape and byte span, checked against each other."""
    fields = entry if isinstance(entry, dict) else {}
    try:
        dtype, shape = fields["dtype"], tuple(fields["shape"])
        begin, end = fields["data_offsets"]
        bits = ITEM_BITS[dtype]
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(path, f"its header describes {name!r} as {entry!r}") from error
    if any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
        raise _damaged(path, f"tensor {name!r} has sizes that are not whole numbers")
    for n in shape:
        bits *= n
    if end - begin != bits // 8:
        raise _damaged(path, f"tensor {name!r} of shape {list(shape)} spans {end - begin} bytes")
    return dtype, shape, begin, end


def _damaged(path: Path, what: str) -> CheckpointError:
    """Make the error for a file that was cut short or overwritten."""
    return CheckpointError(f"{path}: truncated or damaged: {what}; fetch or copy the file again")
