"""Copies of small tensors from the host to the device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on a device, ready for the next kernel; the host does not wait.

    A plain copy to a GPU makes the host wait for all earlier work.  A copy from pinned memory does
    not; torch keeps that memory until the copy has read it.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def put(target: Tensor, values: np.ndarray) -> None:
    """Copy an array of the host to a tensor of its shape and dtype; the host does not wait."""
    source = torch.from_numpy(np.ascontiguousarray(values))
    if target.is_cuda:
        # torch keeps pinned memory until the copy has read it
        target.copy_(source.pin_memory(), non_blocking=True)
    else:
        target.copy_(source)


def upload_together(tensors: Sequence[Tensor], device: torch.device | str) -> tuple[Tensor, ...]:
    """Return tensors of one dtype on a device, brought there by one copy; as `upload`.

    A copy costs the host as much as a launch, however small it is.  The results are parts of one
    tensor.
    """
    if all(tensor.device.type == torch.device(device).type for tensor in tensors):
        return tuple(tensor.to(device) for tensor in tensors)
    moved = upload(torch.cat([tensor.reshape(-1) for tensor in tensors]), device)
    parts = torch.split(moved, [tensor.numel() for tensor in tensors])
    return tuple(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))
