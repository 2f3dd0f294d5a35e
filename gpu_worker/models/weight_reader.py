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

    def tensor(self, name: str, dtype: torch.dtype, device: str, *ranges: slice) -> Tensor:
        """One tensor, or its part in the ranges of its dimensions, converted; the directory has
        checked that it is there.  Nothing beside the part is kept."""
        found = self._tensors[name]
        if found.path not in self._files:
            opened = safe_open(str(found.path), framework="pt")
            self._files[found.path] = self._stack.enter_context(opened)
        file = self._files[found.path]
        whole = tuple(slice(0, size) for size in found.shape)
        ranges = tuple(whole[i] if part == slice(None) else part for i, part in enumerate(ranges))
        if ranges == whole[: len(ranges)]:
            tensor: Tensor = file.get_tensor(found.stored_name)
        else:
            tensor = file.get_slice(found.stored_name)[ranges]
        # A copy in any case: the mapped file may be replaced while the model is in use.
        return tensor.to(device=device, dtype=dtype, copy=True)
