"""Attention of packed sequences with its log-sum-exp.

On a GPU in 16 bits it is torch's flash attention, one launch for all sequences.  Flash attention
does not take FP32.  There, and on a CPU, it is plain products, a sequence at a time: FP32 is chosen
for exactness, and the CPU is for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from nightjar.kernels.upload import upload

PLAIN_ROWS = 256
"""Query rows of one plain product; it bounds the scores in memory, heads * rows * keys."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences laid one after another.

    lengths: of each; starts: int32[n + 1] on the device, where each begins, and the end.
    """

    lengths: tuple[int, ...]
    starts: Tensor

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Packed:
        """Sequences of these lengths."""
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return Packed(tuple(lengths), upload(starts, device))


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: Packed, keys: Packed, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of every sequence's rows to its own keys.

    q: [T, Hq, D]; k, v: [N, Hkv, D], rows and heads at any stride; rows, keys: how both are cut
    into sequences.  causal: the last row sees all keys of its sequence, each row before it one key
    less.
    Returns [T, Hq, D] in q's dtype and float32[T, Hq], the log-sum-exp of the scaled scores.
    """
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        return _flash(q, k, v, rows, keys, scale, causal)
    return _plain(q, k, v, rows, keys, scale, causal)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, rows: Packed, keys: Packed, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """torch's own; the masks of its kernels end at the last row and key, as `causal` says."""
    # 2, because at one row torch takes its path of decode, which splits the keys.
    most_rows, most_keys = max(2, *rows.lengths), max(2, *keys.lengths)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        rows.starts,
        keys.starts,
        most_rows,
        most_keys,
        0.0,
        causal,
        False,
        scale=scale,
        **_unsplit(),
    )
    if lse.shape != (q.shape[1], q.shape[0]):
        raise RuntimeError(
            f"flash attention of torch {torch.__version__} gives a log-sum-exp of {lse.shape} for "
            f"rows {q.shape}: this version is not supported, take torch 2.11 or later"
        )
    return out, lse.t().contiguous()


@cache
def _unsplit() -> dict[str, int]:
    """Keyword arguments that keep torch from splitting a row's keys, where it has them.

    A row's sums must not depend on the longest sequence of the batch.
    """
    schema = torch.ops.aten._flash_attention_forward.default._schema
    return {"num_splits": 1} if any(a.name == "num_splits" for a in schema.arguments) else {}


def _plain(
    q: Tensor, k: Tensor, v: Tensor, rows: Packed, keys: Packed, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Compute the formula in FP32."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    by_rows = (torch.split(x, list(rows.lengths)) for x in (q, out, lse))
    by_keys = (torch.split(x, list(keys.lengths)) for x in (k, v))
    for own_q, own_out, own_lse, own_k, own_v in zip(*by_rows, *by_keys, strict=True):
        shared = q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.float().repeat_interleave(shared, 1) for x in (own_k, own_v))
        for start in range(0, own_q.shape[0], PLAIN_ROWS):
            part = slice(start, start + PLAIN_ROWS)
            scores = torch.einsum("qhd,khd->hqk", own_q[part].float(), wide_k) * scale
            if causal:
                first = own_k.shape[0] - own_q.shape[0] + start
                scores.masked_fill_(_hidden(scores, first), float("-inf"))
            own_lse[part] = scores.logsumexp(-1).t()
            own_out[part] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide_v).to(q.dtype)
    return out, lse


def _hidden(scores: Tensor, first: int) -> Tensor:
    """Return which keys lie after each row: bool[rows, keys]; first: the first row's position."""
    rows, keys = (torch.arange(size, device=scores.device) for size in scores.shape[1:])
    return keys > rows.unsqueeze(1) + first
