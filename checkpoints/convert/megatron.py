"""Reads Megatron-LM's GPT checkpoints: classic and Megatron-Core, in PyTorch's file format.

A checkpoint is a folder for each tensor-parallel rank and pipeline stage, `mp_rank_TT` or
`mp_rank_TT_PPP`.  A stage of a virtual pipeline holds `model0`, `model1`, ...
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightjar.checkpoints.convert.arrays import StoredArray
from nightjar.checkpoints.convert.megatron_arguments import Arguments
from nightjar.checkpoints.convert.megatron_names import common_names, flatten, layer_count
from nightjar.checkpoints.convert.pickles import TensorReference
from nightjar.checkpoints.convert.projections import RowOrder
from nightjar.checkpoints.convert.source import Source, cut_dimension
from nightjar.checkpoints.convert.torch_distributed import METADATA, open_torch_distributed
from nightjar.checkpoints.convert.torch_file import TorchFile, open_torch_file
from nightjar.checkpoints.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
FILE_NAMES = ("model_optim_rng.pt", "model_rng.pt")
_RANK = re.compile(r"(?:mp_rank|tp_rank)_(\d+)(?:_(?:pp_rank_)?(\d+))?(?:_(\d+))?")
_ORDERS: dict[float, RowOrder] = {0.0: "parts", 1.0: "channels", 2.0: "heads", 3.0: "heads"}


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One virtual stage of one rank."""

    file: TorchFile
    tensors: Mapping[str, TensorReference]


def open_megatron(path: Path, given: Mapping[str, Any], version: float | None = None) -> Source:
    """Open a checkpoint: its folder, the folder of an iteration, or one file.

    given: arguments in the place of the checkpoint's, which very old ones do not keep.
    version: of the row order, in the place of the checkpoint's.

    Raises:
        CheckpointError: A shard is missing or differs from the others, or the model is not served.
    """
    if not path.is_file() and (_iteration(path) / METADATA).is_file():
        return open_torch_distributed(_iteration(path), given)
    files = _shard_files(path)
    grid = {place: open_torch_file(file) for place, file in files.items()}
    first = grid[0, 0]
    _check_one_checkpoint(grid)
    core = _is_core(first)
    namespace = first.value.get("args") if isinstance(first.value, dict) else None
    arguments = Arguments.of(namespace, given, str(first.path), core)
    _check_grid(grid, arguments)
    order = _row_order(first, core, version)
    tensors, equal = _collect(grid, arguments)
    rows = sum(part.shape[0] for part in tensors.get("tokens.weight", ()))
    ranks, stages = 1 + max(rank for rank, _ in grid), 1 + max(stage for _, stage in grid)
    kind = "Megatron-Core" if core else f"Megatron-LM, rows of version {_version(first, version)}"
    return Source(
        description=f"{kind}, {ranks} x {stages} shards",
        shape=arguments.shape(rows),
        tensors=tensors,
        row_order=order,
        gate_within_ranks=True,
        equal=equal,
        files=tuple(file.path for file in grid.values()),
        adds_one=arguments.adds_one,
        vocab_multiple=arguments.vocab_multiple(ranks),
    )


def _shard_files(path: Path) -> dict[tuple[int, int], Path]:
    """Return the file of each rank and stage."""
    if path.is_file():
        return {(0, 0): path}
    folder = _iteration(path)
    found: dict[tuple[int, int], Path] = {}
    for child in sorted(folder.iterdir()):
        match = _RANK.fullmatch(child.name)
        if match is None or not child.is_dir():
            continue
        if match[3] is not None:
            raise CheckpointError(f"{child}: mixtures of experts are not supported")
        files = [child / name for name in FILE_NAMES if (child / name).is_file()]
        if not files:
            raise CheckpointError(f"{child}: no {FILE_NAMES[0]}; copy the shard again")
        found[int(match[1]), int(match[2] or 0)] = files[0]
    if not found and list(folder.glob("*/.zarray"))[:1]:
        raise CheckpointError(
            f"{folder}: the format zarr is not read; save the checkpoint with --ckpt-format torch "
            "or torch_dist"
        )
    if not found:
        raise CheckpointError(
            f"{folder}: no folders mp_rank_..; give the folder of a Megatron-LM checkpoint or of "
            "one of its iterations"
        )
    return found


def _iteration(path: Path) -> Path:
    """Return the folder of the newest iteration, or the path itself."""
    tracker = path / TRACKER
    if not tracker.is_file():
        return path
    name = tracker.read_text()[:64].strip()
    folder = path / ("release" if name == "release" else f"iter_{name:0>7}")
    if not (name == "release" or name.isdecimal()) or not folder.is_dir():
        raise CheckpointError(f"{tracker} names {name!r}, and there is no {folder.name} beside it")
    return folder


def _check_one_checkpoint(grid: Mapping[tuple[int, int], TorchFile]) -> None:
    """Raise unless all files are of one iteration and version."""
    first = grid[min(grid)]
    for file in grid.values():
        if not isinstance(file.value, dict) or not any(_chunk_keys(file)):
            raise CheckpointError(f"{file.path}: holds no model of Megatron-LM")
        for key in ("iteration", "checkpoint_version"):
            ours, theirs = first.value.get(key), file.value.get(key)
            if ours != theirs:
                raise CheckpointError(
                    f"{file.path}: {key} is {theirs!r}, but {first.path} has {ours!r}; the shards "
                    "are of different checkpoints"
                )


def _check_grid(grid: Mapping[tuple[int, int], TorchFile], arguments: Arguments) -> None:
    """Raise unless there is a shard of each rank and stage."""
    ranks, stages = 1 + max(rank for rank, _ in grid), 1 + max(stage for _, stage in grid)
    expected = max(ranks, arguments.tensor_ranks), max(stages, arguments.pipeline_ranks)
    missing = [
        f"mp_rank_{rank:02d}_{stage:03d}" if expected[1] > 1 else f"mp_rank_{rank:02d}"
        for rank in range(expected[0])
        for stage in range(expected[1])
        if (rank, stage) not in grid
    ]
    if missing:
        names = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
        raise CheckpointError(f"{arguments.where}: shards are missing: {names}")
    if (ranks, stages) != (arguments.tensor_ranks, arguments.pipeline_ranks) and (
        arguments.tensor_ranks > 1 or arguments.pipeline_ranks > 1
    ):
        raise CheckpointError(
            f"{arguments.where}: there are {ranks} x {stages} shards, but the checkpoint was saved "
            f"by {arguments.tensor_ranks} x {arguments.pipeline_ranks}; remove the shards of "
            "another checkpoint"
        )


def _chunk_keys(file: TorchFile) -> list[str]:
    """Return the keys of the models in a file: `model`, or model0, model1, ... in order."""
    if "model" in file.value:
        return ["model"]
    count = sum(bool(re.fullmatch(r"model\d+", str(key))) for key in file.value)
    keys = [f"model{number}" for number in range(count)]
    if any(key not in file.value for key in keys):
        raise CheckpointError(f"{file.path}: its virtual stages are not numbered from 0")
    return keys


def _is_core(file: TorchFile) -> bool:
    names = (name for key in _chunk_keys(file) for name, _ in flatten(file.value[key]))
    return any(name.startswith(("decoder.", "embedding.")) for name in names)


def _version(file: TorchFile, given: float | None) -> float:
    found = given if given is not None else file.value.get("checkpoint_version", 0)
    if isinstance(found, bool) or not isinstance(found, int | float) or found not in _ORDERS:
        raise CheckpointError(
            f"{file.path}: checkpoint_version {found!r} is unknown: expected "
            f"{', '.join(map(str, _ORDERS))}"
        )
    return float(found)


def _row_order(file: TorchFile, core: bool, given: float | None) -> RowOrder:
    return "heads" if core and given is None else _ORDERS[_version(file, given)]


def _collect(
    grid: Mapping[tuple[int, int], TorchFile], arguments: Arguments
) -> tuple[dict[str, tuple[StoredArray, ...]], dict[str, tuple[StoredArray, ...]]]:
    """Return the arrays of each tensor by rank, and those that must equal the embeddings."""
    ranks, stages = 1 + max(rank for rank, _ in grid), 1 + max(stage for _, stage in grid)
    chunks = [_chunks(grid[0, stage]) for stage in range(stages)]
    if len({len(of_stage) for of_stage in chunks}) != 1:
        raise CheckpointError(f"{arguments.where}: its stages have different numbers of chunks")
    tensors: dict[str, list[StoredArray]] = defaultdict(list)
    heads: list[StoredArray] = []
    layer = 0
    for number in range(len(chunks[0])):
        for stage in range(stages):
            here = [_chunks(grid[rank, stage])[number] for rank in range(ranks)]
            named = [
                common_names(chunk.tensors, layer, arguments.hybrid, str(chunk.file.path))
                for chunk in here
            ]
            _check_ranks(here, named)
            layer += layer_count(here[0].tensors)
            _add(tensors, heads, here, named, tied=arguments.tied)
    _check_layers(layer, arguments)
    equal = {"tokens.weight": tuple(heads)} if heads else {}
    return {name: tuple(parts) for name, parts in tensors.items()}, equal


def _chunks(file: TorchFile) -> list[_Chunk]:
    return [_Chunk(file, dict(flatten(file.value[key]))) for key in _chunk_keys(file)]


def _check_ranks(chunks: Sequence[_Chunk], named: Sequence[Mapping[str, TensorReference]]) -> None:
    """Raise unless all ranks of a stage hold the same tensors."""
    for chunk, names in zip(chunks, named, strict=True):
        different = sorted(set(names) ^ set(named[0]))
        if different:
            raise CheckpointError(
                f"{chunk.file.path}: {different[0]} is not in all shards of its stage; the files "
                "do not belong to one checkpoint"
            )


def _add(
    tensors: dict[str, list[StoredArray]],
    heads: list[StoredArray],
    chunks: Sequence[_Chunk],
    named: Sequence[Mapping[str, TensorReference]],
    *,
    tied: bool,
) -> None:
    """Add one stage's tensors, a part for each rank."""
    for name in named[0]:
        parts = [
            chunk.file.array(names[name], name) for chunk, names in zip(chunks, named, strict=True)
        ]
        if cut_dimension(name) is None and any(part.shape != parts[0].shape for part in parts):
            raise CheckpointError(f"{parts[0].path}: {name} has another shape in another shard")
        if name == "head.weight" and tied:
            heads += parts
        elif name in tensors:
            raise CheckpointError(f"{parts[0].path}: {name} is in two stages")
        else:
            tensors[name] += parts


def _check_layers(found: int, arguments: Arguments) -> None:
    expected = arguments.size("num_layers", default=found)
    if found != expected:
        raise CheckpointError(
            f"{arguments.where}: its shards hold {found} layers, but num_layers is {expected}"
        )
