"""Merging two partial attentions of the same query rows."""

import torch
from torch import Tensor


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """Attention over the union of two key sets, from the results over each.

    out_a, out_b: [T, H, D], softmax-weighted values over each set; lse_a, lse_b: float32[T, H],
    the log-sum-exp of each set's scores.  Returns [T, H, D] in out_a's dtype.
    The weights exp(lse_a) and exp(lse_b), normalised, are a sigmoid of the difference.
    """
    weight = torch.sigmoid(lse_b - lse_a).unsqueeze(-1)
    return torch.lerp(out_a.float(), out_b.float(), weight).to(out_a.dtype)
