"""Small tensors from the host to where kernels run."""

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The same on a device, when what is asked for next reads it; the host does not wait.

    A plain copy to a GPU lets the host wait until all that was asked for before is done.  From
    pinned memory, which torch keeps until the copy has read it, it does not.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
