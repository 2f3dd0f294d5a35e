"""Packed weights in a file that all processes of a machine map: one copy in memory for all.

The first process that loads a model packs its weights, writes the file and maps it. Later ones map
it, and read nothing. The file's name changes with the model, the precision, the processor and the
versions. A file is complete when it has its name, and is never changed after that.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nightjar import __version__
from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models.decoder import Decoder, DecoderWeights
from nightjar.gpu_worker.models.plan_rules import PlanRules, stored_plan
from nightjar.gpu_worker.models.precision import precision_of
from nightjar.gpu_worker.models.rope import RopeTable
from nightjar.kernels import stored_weights
from nightjar.kernels.device import identity

logger = logging.getLogger(__name__)

MAGIC = b"NJW1"
ALIGNMENT = 4096
FREE_BYTES = 1 << 30
"""The disk keeps so much free."""
_MOST_HEADER_BYTES = 256 << 20
_CLASSES = {**stored_weights.KNOWN, "DecoderWeights": DecoderWeights, "RopeTable": RopeTable}


def load_shared(
    directory: ModelDirectory, dtype: str, folder: Path, load: Callable[[str], Decoder]
) -> Decoder:
    """Return a decoder whose weights are mapped from a file of the folder, made if it is missing.

    dtype: as `load_model` takes it.  load: loads the model in that precision, on the CPU.
    Where the file cannot be made or its weights cannot be stored, the decoder has its own copy.

    Raises:
        What `load` raises.
    """
    path = folder / f"{directory.name}-{_key(directory, dtype)}.weights"
    started = time.monotonic()
    found = _mapped(path, directory, dtype)
    if found is not None:
        logger.info(
            "mapped the weights of %s from %s in %.2f s",
            directory.name,
            path,
            time.monotonic() - started,
            extra={"action": "weights_mapped"},
        )
        return found
    own = load(dtype)
    try:
        _write(path, own.weights)
    except (stored_weights.NotStorableError, OSError) as error:
        logger.warning(
            "the weights of %s are not shared with other workers: %s",
            directory.name,
            error,
            extra={"action": "weights_not_shared"},
        )
        return own
    return _mapped(path, directory, dtype) or own


def _key(directory: ModelDirectory, dtype: str) -> str:
    """Return a name for everything that packed weights depend on."""
    parts = [directory.fingerprint, dtype, identity(), __version__, torch.__version__]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _mapped(path: Path, directory: ModelDirectory, dtype: str) -> Decoder | None:
    """Return the decoder of a file; None where it is missing or not as it was written."""
    try:
        with path.open("rb") as file:
            header = _read_header(file.read(len(MAGIC) + 8), file.read)
        size = path.stat().st_size
        tensors = _tensors(path, header, size)
        weights = stored_weights.restored(header["weights"], tensors, _CLASSES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, IndexError, TypeError, RuntimeError) as error:
        logger.warning("%s is made again: %s", path, error, extra={"action": "weights_damaged"})
        return None
    precision = precision_of(dtype, "cpu")
    config = PlanRules(stored_plan(directory, dtype), dtype).scaled(directory.config)
    return Decoder(config, weights, precision.dtype, precision.cache, "cpu")


def _read_header(start: bytes, read: Callable[[int], bytes]) -> dict[str, Any]:
    """Return the header after the magic and its length."""
    length = int.from_bytes(start[len(MAGIC) :], "little")
    if start[: len(MAGIC)] != MAGIC or length > _MOST_HEADER_BYTES:
        raise ValueError("no file of packed weights")
    found = json.loads(read(length))
    if not isinstance(found, dict):
        raise TypeError("the header is no object")
    return found


def _tensors(path: Path, header: dict[str, Any], size: int) -> list[Tensor]:
    """Map the file, and return its tensors."""
    if size != header["size"]:
        raise ValueError(f"{size} bytes instead of {header['size']}")
    # Not shared: a write into a weight, which nobody does, would stay in this process.
    mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    storage = mapped.untyped_storage()
    return [_tensor(storage, entry) for entry in header["tensors"]]


def _tensor(storage: torch.UntypedStorage, entry: dict[str, Any]) -> Tensor:
    dtype = getattr(torch, entry["dtype"])
    made = torch.empty(0, dtype=dtype)
    if (entry["begin"] + math.prod(entry["shape"]) * dtype.itemsize) > storage.nbytes():
        raise ValueError("a tensor beyond the end")
    strides = torch.empty(entry["shape"], device="meta").stride()
    return made.set_(storage, entry["begin"] // dtype.itemsize, entry["shape"], strides)


def _write(path: Path, weights: DecoderWeights) -> None:
    """Write the file under another name, then give it its own.

    Raises:
        NotStorableError: A weight is of a kind that no other process can map.
        OSError: The disk has no room, or the folder cannot be written.
    """
    tensors: list[Tensor] = []
    tree = stored_weights.described(weights, tensors, _CLASSES)
    tensors = [tensor.contiguous() for tensor in tensors]
    sizes = [tensor.numel() * tensor.itemsize for tensor in tensors]
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if shutil.disk_usage(path.parent).free < sum(sizes) + FREE_BYTES:
        raise OSError(f"{path.parent} has no room for {sum(sizes) >> 20} MiB")
    header, begins = _header(tree, tensors, sizes)
    handle, name = tempfile.mkstemp(prefix=".weights-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(header)
            for begin, tensor in zip(begins, tensors, strict=True):
                file.seek(begin)
                file.write(tensor.view(-1).view(torch.uint8).numpy().data)
            file.truncate(_aligned(file.tell()))
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _header(
    tree: object, tensors: Sequence[Tensor], sizes: Sequence[int]
) -> tuple[bytes, list[int]]:
    """Return the beginning of the file, and where each tensor begins."""
    relative, end = [], 0
    for size in sizes:
        relative.append(end)
        end = _aligned(end + size)
    room = ALIGNMENT
    while True:  # the header holds offsets that grow with its own length
        begins = [room + begin for begin in relative]
        entries = [
            {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape), "begin": begin}
            for t, begin in zip(tensors, begins, strict=True)
        ]
        text = json.dumps({"size": room + end, "tensors": entries, "weights": tree}).encode()
        made = MAGIC + len(text).to_bytes(8, "little") + text
        if len(made) <= room:
            return made, begins
        room = _aligned(len(made))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
