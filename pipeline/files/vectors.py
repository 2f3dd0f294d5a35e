"""Prompt vectors (P-tuning) and LoRA adapters: reading their files, registering them by name."""

import hashlib
import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from nightjar.checkpoints import CheckpointError, ModelDirectory
from nightjar.checkpoints.adapters import rank_of, read_adapter
from nightjar.jobs.errors import VectorKindError
from nightjar.jobs.store.vectors import Vectors
from nightjar.jobs.vector_records import LORA, PromptVector

TRAINED_FOR = "nightjar_model"
"""The key of a vector file's metadata that holds the fingerprint of its model."""

_CONFIG = "adapter_config.json"
_MOST_BYTES = 256 << 20
_LORA = "LORA"
_PEFT_TYPES = ("PROMPT_TUNING", "P_TUNING")
_FLOATS = ("float16", "float32", "float64")


class VectorsError(Exception):
    """A file of prompt vectors, or an adapter, cannot be used."""


def register_vectors(
    vectors: Vectors,
    name: str,
    path: Path,
    model: ModelDirectory,
    no_adapters: str | None = None,
) -> PromptVector:
    """Register the vectors of a file under a name; a changed file becomes a new version.

    Args:
        vectors: The store of prompt vectors and adapters, which every worker reads.
        name: What requests write in `prompt_vector` or `adapter`; no `@`, which separates the
            version.
        path: A safetensors file with one tensor [rows, width] of floats, or a directory that PEFT
            saved for prompt tuning, P-tuning or LoRA.
        model: The model that they are for. Where the file names a model, it must be this one.
        no_adapters: Why adapters of this model cannot be served; None where they can.

    Raises:
        VectorsError: The name or the file cannot be used.
    """
    if not name or "@" in name or len(name) > 255:
        raise VectorsError(f"prompt vector name {name[:80]!r}: use 1 to 255 characters without @")
    try:
        if path.is_dir() and _peft_type(path) == _LORA:
            if no_adapters is not None:
                raise VectorsError(f"{path} is a LoRA adapter, which is not served: {no_adapters}")
            return _register_adapter(vectors, name, path, model)
        return _register_vectors(vectors, name, path, model)
    except VectorKindError as error:
        raise VectorsError(str(error)) from error


def _register_adapter(
    vectors: Vectors, name: str, folder: Path, model: ModelDirectory
) -> PromptVector:
    """Register a LoRA adapter, for this model only: its shapes were checked against it."""
    try:
        factors = read_adapter(folder, model.config)
    except CheckpointError as error:
        raise VectorsError(str(error)) from error
    data = save(factors, {TRAINED_FOR: model.fingerprint})
    if len(data) > _MOST_BYTES:
        raise VectorsError(f"{folder}: the factors take more than {_MOST_BYTES >> 20} MiB in FP32")
    digest = hashlib.sha256(data).hexdigest()
    rank, width = rank_of(factors), model.config.hidden_size
    return vectors.put(name, data, rank, width, digest, model.fingerprint, LORA)


def _register_vectors(
    vectors: Vectors, name: str, path: Path, model: ModelDirectory
) -> PromptVector:
    """Register prompt vectors; see `register_vectors`."""
    if path.is_dir():
        path = adapter_file(path)
    read = _read(path)
    rows, columns = read.shape
    width = model.config.hidden_size
    if columns != width:
        raise VectorsError(f"{path}: the vectors are {columns} wide; this model needs {width}")
    fingerprint = _trained_for(path)
    if fingerprint is not None and fingerprint != model.fingerprint:
        raise VectorsError(
            f"{path}: the vectors were trained for another model than {model.name}; train them "
            "again for this one"
        )
    data = save({"vectors": read})
    digest = hashlib.sha256(data).hexdigest()
    return vectors.put(name, data, rows, columns, digest, fingerprint)


def adapter_file(folder: Path) -> Path:
    """The weight file of a directory that PEFT saved for prompt tuning or P-tuning.

    Raises:
        VectorsError: It holds something else, or a pickle.
    """
    kind, weights = _peft_type(folder), folder / "adapter_model.safetensors"
    if kind not in _PEFT_TYPES:
        raise VectorsError(
            f"{folder / _CONFIG}: peft_type is {kind!r}; use one of "
            f"{', '.join((*_PEFT_TYPES, _LORA))}"
        )
    if not weights.is_file() and (folder / "adapter_model.bin").exists():
        raise VectorsError(
            f"{folder} holds adapter_model.bin, a pickle, which is never read; save the adapter "
            "with safe_serialization=True"
        )
    return weights


def _peft_type(folder: Path) -> object:
    """What PEFT saved in a directory.

    Raises:
        VectorsError: Its configuration cannot be read.
    """
    config = folder / _CONFIG
    try:
        return json.loads(config.read_bytes())["peft_type"]
    except OSError as error:
        raise VectorsError(f"{config} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise VectorsError(f"{config} is no configuration of an adapter: {error}") from error


def _trained_for(path: Path) -> str | None:
    """The fingerprint of the model that the file was trained for, if it says so."""
    with safe_open(path, framework="numpy") as file:
        return (file.metadata() or {}).get(TRAINED_FOR)


def _read(path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """The file's vectors, float32 [rows, width]."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise VectorsError(f"{path} is larger than {_MOST_BYTES >> 20} MiB")
        tensors = load(path.read_bytes())
    except OSError as error:
        raise VectorsError(f"{path} cannot be read: {error.strerror}") from error
    except SafetensorError as error:
        raise VectorsError(f"{path} is not a whole safetensors file: {error}") from error
    if len(tensors) != 1:
        raise VectorsError(f"{path} holds {len(tensors)} tensors; prompt vectors are one")
    (tensor,) = tensors.values()
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise VectorsError(
            f"{path}: the tensor's shape is {tensor.shape}; it must be [rows, width]"
        )
    if tensor.dtype.name not in _FLOATS:
        raise VectorsError(f"{path}: the tensor is {tensor.dtype}; save it as float32 or float16")
    if not np.isfinite(tensor).all():
        raise VectorsError(f"{path}: the vectors hold NaN or infinity")
    return np.ascontiguousarray(tensor, dtype=np.float32)
