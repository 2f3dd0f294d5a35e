"""Reading named tensors out of a directory's safetensors files."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nightjar.checkpoints import ModelDirectory


class WeightReader:
    """The tensors of a model directory by name, whichever file holds them.

    Files are mapped, not read: a tensor's bytes are touched when it is asked for.
    """

    def __init__(self, directory: ModelDirectory) -> None:
        self._tensors = directory.tensors
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def tensor(self, name: str, dtype: torch.dtype, device: str) -> Tensor:
        """One tensor, converted; the directory has checked that it is there."""
        found = self._tensors[name]
        if found.path not in self._files:
            opened = safe_open(str(found.path), framework="pt")
            self._files[found.path] = self._stack.enter_context(opened)
        tensor: Tensor = self._files[found.path].get_tensor(found.stored_name)
        # A copy in any case: the mapped file may be replaced while the model is in use.
        return tensor.to(device=device, dtype=dtype, copy=True)
