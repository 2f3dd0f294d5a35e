"""Copies of small tensors from the host to the device."""

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
