"""Reads named tensors from a directory's safetensors files."""

from __future__ import annotations

import torch
from safetensors import safe_open
from torch import Tensor

from nightjar.checkpoints import ModelDirectory
from nightjar.checkpoints.disk import ReadAhead
from nightjar.gpu_worker.models.tensors_ahead import TensorsAhead


class WeightReader:
    """Reads the tensors of a model directory by name.

    A file is mapped for one tensor at a time, because mapped pages count as memory of the process.

    Args:
        directory: The model's.
        ahead: Has the tensors that are expected read from disk, where there is one.
    """

    def __init__(self, directory: ModelDirectory, ahead: ReadAhead | None = None) -> None:
        self._tensors = directory.tensors
        self._ahead = None if ahead is None else TensorsAhead(directory, ahead)

    def expect(self, beginning: str) -> None:
        """Say that all tensors whose names begin so are needed soon."""
        if self._ahead is not None:
            self._ahead.expect(beginning)

    def tensor(
        self, name: str, dtype: torch.dtype, device: str, *ranges: slice, keep: bool = True
    ) -> Tensor:
        """Read and convert one tensor, or the part in the ranges of its dimensions.

        The directory has checked that the tensor is there.  Only the part is kept.

        keep: otherwise the result may be mapped from the file; drop it before the next tensors.
        """
        found = self._tensors[name]
        whole = tuple(slice(0, size) for size in found.shape)
        ranges = tuple(whole[i] if part == slice(None) else part for i, part in enumerate(ranges))
        with safe_open(str(found.path), framework="pt") as file:
            if ranges == whole[: len(ranges)]:
                tensor: Tensor = file.get_tensor(found.stored_name)
            else:
                tensor = file.get_slice(found.stored_name)[ranges]
            # What is kept is a copy: the mapped file may be replaced while the model is in use.
            return tensor.to(device=device, dtype=dtype, copy=keep)
