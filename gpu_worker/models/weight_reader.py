"""Reading named tensors out of a directory's safetensors files."""

from __future__ import annotations

import torch
from safetensors import safe_open
from torch import Tensor

from nightjar.checkpoints import ModelDirectory


class WeightReader:
    """The tensors of a model directory by name, whichever file holds them.

    A file is mapped for one tensor at a time: its pages would count as ours for as long as it is.
    """

    def __init__(self, directory: ModelDirectory) -> None:
        self._tensors = directory.tensors

    def tensor(self, name: str, dtype: torch.dtype, device: str, *ranges: slice) -> Tensor:
        """One tensor, or its part in the ranges of its dimensions, converted; the directory has
        checked that it is there.  Nothing beside the part is kept."""
        found = self._tensors[name]
        whole = tuple(slice(0, size) for size in found.shape)
        ranges = tuple(whole[i] if part == slice(None) else part for i, part in enumerate(ranges))
        with safe_open(str(found.path), framework="pt") as file:
            if ranges == whole[: len(ranges)]:
                tensor: Tensor = file.get_tensor(found.stored_name)
            else:
                tensor = file.get_slice(found.stored_name)[ranges]
            # A copy in any case: the mapped file may be replaced while the model is in use.
            return tensor.to(device=device, dtype=dtype, copy=True)
