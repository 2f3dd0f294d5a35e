"""The precision of sums."""

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """Return x in FP32, or in FP64 if it is FP64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
