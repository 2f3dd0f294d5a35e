"""Attention of packed sequences to themselves."""

import torch
from torch import Tensor

from nightjar.kernels.layout import RaggedGroup, RaggedLayout


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: RaggedLayout, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each packed sequence.

    q: [T, H, D]; k, v: [T, Hkv, D]; scale multiplies the scores.
    Returns out [T, H, D] in q's dtype and the log-sum-exp of the scores, float32[T, H].
    """
    outs, lses = [], []
    for group in layout.groups:
        parts = (padded(q, group), padded(k, group), padded(v, group))
        out, lse = flash(*parts, scale, causal=True)
        outs.append(out)
        lses.append(lse)
    return unpadded(outs, layout), unpadded(lses, layout)


def padded(x: Tensor, group: RaggedGroup) -> Tensor:
    """Rows of a group as a batch: [T, H, D] -> [n, H, padded, D]."""
    rows = x.index_select(0, group.rows)
    return rows.view(-1, group.padded, *x.shape[1:]).transpose(1, 2)


def unpadded(parts: list[Tensor], layout: RaggedLayout) -> Tensor:
    """The groups' results [n, H, padded, ...] back as packed rows [T, H, ...]."""
    flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    whole = flat[0] if len(flat) == 1 else torch.cat(flat)
    return whole.index_select(0, layout.unpad)


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """torch's tiled attention with its log-sum-exp: q [n, H, Lq, D], k and v [n, Hkv, Lk, D].

    Softmax and sums run in FP32 for every storage dtype.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out: Tensor
    lse: Tensor
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scale
    )
    return out, lse
