"""The precision that sums are taken in."""

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """x in FP32, or in FP64 if it is in that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
