"""Merges two partial attentions of the same query rows."""

import torch
from torch import Tensor

from nightjar.kernels.reference.widened import widened


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """Return the attention over the union of two key sets, from the results over each.

    out_a, out_b: [T, H, D], softmax-weighted values over each set; lse_a, lse_b: float32[T, H],
    the log-sum-exp of each set's scores.  Returns [T, H, D] in out_a's dtype.
    """
    # The weights are a softmax of two, taken row by row: an elementwise sigmoid computes the
    # tail of a tensor with other instructions than its middle, and bits would depend on T.
    weights = torch.stack((lse_a, lse_b), -1).softmax(-1)
    merged = widened(out_a) * weights[..., :1]
    merged += widened(out_b) * weights[..., 1:]
    return merged.to(out_a.dtype)
