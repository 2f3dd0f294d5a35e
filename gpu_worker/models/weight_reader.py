"""Reading named tensors out of a directory's safetensors files."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nightjar.checkpoints import CheckpointError, ModelDirectory

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")

# Checkpoints of a bare decoder and of one with a head differ by this prefix.
OPTIONAL_PREFIX = "transformer."


class WeightReader:
    """The tensors of a model directory by name, whichever file holds them.

    Files are mapped, not read: a tensor's bytes are touched when it is asked for.
    """

    def __init__(self, directory: ModelDirectory) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._found: dict[str, tuple[str, str, str, tuple[int, ...]]] = {}
        for header in directory.headers:
            for stored, (dtype, shape) in header.tensors.items():
                name = stored.removeprefix(OPTIONAL_PREFIX)
                self._found[name] = (str(header.path), stored, dtype, shape)

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Every named tensor is there, in floating point, with this shape; else an error."""
        for name, expected in shapes.items():
            if name not in self._found:
                raise CheckpointError(
                    f"{self._directory.path}: the weights hold no tensor {name!r}, which "
                    "config.json asks for; the two belong to different models or a shard is missing"
                )
            path, _, dtype, shape = self._found[name]
            if shape != expected:
                raise CheckpointError(
                    f"{path}: tensor {name!r} has shape {list(shape)}, but config.json asks for "
                    f"{list(expected)}; use the config.json that was saved with these weights"
                )
            if dtype not in FLOAT_TYPES:
                raise CheckpointError(
                    f"{path}: tensor {name!r} is stored as {dtype}; save it as one of "
                    f"{', '.join(FLOAT_TYPES)}"
                )

    def tensor(self, name: str, dtype: torch.dtype, device: str) -> Tensor:
        """One tensor, converted; its name must have passed `check`."""
        path, stored, _, _ = self._found[name]
        if path not in self._files:
            self._files[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        tensor: Tensor = self._files[path].get_tensor(stored)
        # A copy in any case: the mapped file may be replaced while the model is in use.
        return tensor.to(device=device, dtype=dtype, copy=True)
