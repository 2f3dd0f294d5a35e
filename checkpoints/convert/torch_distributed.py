"""Reads Megatron-Core's checkpoints of the format `torch_dist`.

`.metadata` lists the chunks of every tensor: where each begins in the tensor, and in which file.
A chunk is a small file of torch.save within a `.distcp` file.  Chunks are parts of rows or columns,
in the place of the ranks that wrote them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nightjar.checkpoints.convert.arrays import StoredArray
from nightjar.checkpoints.convert.megatron_arguments import Arguments
from nightjar.checkpoints.convert.megatron_names import common_name
from nightjar.checkpoints.convert.pickles import Opaque, TensorReference, read_pickle, sizes_of
from nightjar.checkpoints.convert.source import Source, cut_dimension
from nightjar.checkpoints.convert.torch_file import open_torch_file
from nightjar.checkpoints.errors import CheckpointError

METADATA = ".metadata"
COMMON = "common.pt"
_OTHERS = ("optimizer.", "rng_state", "rerun_state", "_extra_state", "chained_")
_STACKED = "layers."


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk: where it begins in its tensor, and the bytes that hold it."""

    offsets: tuple[int, ...]
    path: Path
    begin: int
    length: int


def open_torch_distributed(folder: Path, given: Mapping[str, Any]) -> Source:
    """Open the folder of an iteration.

    Raises:
        CheckpointError: It is damaged, or the model is not served.
    """
    common = open_torch_file(folder / COMMON).value
    if not isinstance(common, dict):
        raise CheckpointError(f"{folder / COMMON}: holds no arguments of Megatron-LM")
    arguments = Arguments.of(common.get("args"), given, str(folder / COMMON), core=True)
    tensors: dict[str, tuple[StoredArray, ...]] = {}
    for name, chunks in _chunks(folder).items():
        for layer, of_layer in _by_layer(name, chunks).items():
            key = name if layer is None else _with_layer(name, layer)
            common_key = common_name(key, 0, arguments.hybrid)
            if common_key is None:
                raise CheckpointError(f"{folder}: tensor {name!r} is not supported")
            tensors[common_key] = _arrays(of_layer, common_key, stacked=layer is not None)
    if arguments.tied:
        tensors.pop("head.weight", None)
    rows = sum(part.shape[0] for part in tensors.get("tokens.weight", ()))
    files = sorted({part.path for parts in tensors.values() for part in parts})
    return Source(
        description=f"Megatron-Core, torch_dist, {len(files)} files",
        shape=arguments.shape(rows),
        tensors=tensors,
        row_order="heads",
        gate_within_ranks=False,
        equal={},
        files=(folder / METADATA, folder / COMMON, *files),
        adds_one=arguments.adds_one,
        vocab_multiple=arguments.vocab_multiple(arguments.tensor_ranks),
    )


def _chunks(folder: Path) -> dict[str, list[_Chunk]]:
    """Return the chunks of each weight."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata, _ = read_pickle(file, str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    stored = metadata.state.get("storage_data") if isinstance(metadata, Opaque) else None
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path}: lists no chunks; copy the file again")
    found: dict[str, list[_Chunk]] = defaultdict(list)
    for index, place in stored.items():
        name, chunk = _entry(path, index, place)
        if chunk is not None and not any(part in name for part in _OTHERS):
            found[name].append(chunk)
    return found


def _entry(path: Path, index: object, place: object) -> tuple[str, _Chunk | None]:
    """Return the tensor's name and one chunk of it; None for what is no tensor."""
    if not isinstance(index, Opaque) or not isinstance(place, Opaque):
        raise CheckpointError(f"{path}: an unknown entry; copy the file again")
    name, offset = index.state.get("fqn"), index.state.get("offset")
    file, begin = place.state.get("relative_path"), place.state.get("offset")
    length = place.state.get("length")
    if (
        not isinstance(name, str)
        or not isinstance(file, str)
        or Path(file).name != file
        or type(begin) is not int
        or type(length) is not int
        or min(begin, length) < 0
    ):
        raise CheckpointError(f"{path}: an entry that names no place; copy the file again")
    if place.state.get("transform_descriptors"):
        raise CheckpointError(f"{path}: {name} is compressed, which is not supported")
    if offset is None:
        return name, None
    return name, _Chunk(sizes_of(offset), path.parent / file, begin, length)


def _by_layer(name: str, chunks: Sequence[_Chunk]) -> dict[int | None, list[_Chunk]]:
    """Share the chunks among layers, where one tensor holds all layers one behind the other."""
    _, found, rest = name.partition(_STACKED)
    if not found or rest.split(".", 1)[0].isdecimal():
        return {None: list(chunks)}
    by_layer: dict[int | None, list[_Chunk]] = defaultdict(list)
    for chunk in chunks:
        by_layer[chunk.offsets[0]].append(replace(chunk, offsets=chunk.offsets[1:]))
    return by_layer


def _with_layer(name: str, layer: int) -> str:
    before, found, rest = name.partition(_STACKED)
    return f"{before}{found}{layer}.{rest}"


def _arrays(chunks: Sequence[_Chunk], name: str, *, stacked: bool) -> tuple[StoredArray, ...]:
    """Return the arrays of a tensor's chunks, in the order of the dimension that is cut."""
    dimension = cut_dimension(name) or 0
    parts, position = [], 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets):
        array = _array(chunk, name, stacked=stacked)
        expected = [0] * len(array.shape)
        expected[dimension] = position
        if list(chunk.offsets) != expected:
            raise CheckpointError(
                f"{chunk.path}: {name} is cut in another way than tensor-parallel ranks cut it, or "
                "a chunk is missing; save the checkpoint with --ckpt-format torch"
            )
        position += array.shape[dimension]
        parts.append(array)
    return tuple(parts)


def _array(chunk: _Chunk, name: str, *, stacked: bool) -> StoredArray:
    opened = open_torch_file(chunk.path, chunk.begin, chunk.length)
    if not isinstance(opened.value, TensorReference):
        raise CheckpointError(f"{chunk.path}: {name} is no tensor")
    array = opened.array(opened.value, name)
    if stacked:
        if len(array.shape) < 2 or array.shape[0] != 1:
            raise CheckpointError(f"{chunk.path}: {name} holds several layers in one chunk")
        array = replace(array, shape=array.shape[1:], strides=array.strides[1:])
    return array
