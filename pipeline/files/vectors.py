"""Prompt vectors (P-tuning): reading a safetensors file and registering it under a name."""

import hashlib
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.store.vectors import Vectors
from nightjar.jobs.vector_records import PromptVector

TRAINED_FOR = "nightjar_model"
"""The key of a vector file's metadata that holds the fingerprint of its model."""

_MOST_BYTES = 256 << 20
_FLOATS = ("float16", "float32", "float64")


class VectorsError(Exception):
    """A file of prompt vectors cannot be used."""


def register_vectors(
    vectors: Vectors, name: str, path: Path, model: ModelDirectory
) -> PromptVector:
    """Register the vectors of a file under a name; a changed file becomes a new version.

    Args:
        vectors: The store of prompt vectors, which every worker reads.
        name: What requests write in `prompt_vector`; no `@`, which separates the version.
        path: A safetensors file with one tensor [rows, width] of floats.
        model: The model that they are for. Where the file names a model, it must be this one.

    Raises:
        VectorsError: The name or the file cannot be used.
    """
    if not name or "@" in name or len(name) > 255:
        raise VectorsError(f"prompt vector name {name[:80]!r}: use 1 to 255 characters without @")
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
