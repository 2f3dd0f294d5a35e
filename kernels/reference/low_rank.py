"""Products of low rank beside those of a projection: LoRA (arXiv 2106.09685), by group of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nightjar.kernels.low_rank import LowRank, RowGroup
from nightjar.kernels.reference.linear import FloatWeight, float_linear, pack_float


def add_low_rank(y: Tensor, x: Tensor, rows: Tensor, groups: Sequence[RowGroup]) -> None:
    """Add x @ down @ up of each group to its rows of y, in place.

    y: float32 or float64 [T, out]; x: of the same dtype [M, in], the inputs of the groups' rows;
    rows: int64[M], where they lie in y, each once.  Sums are taken in y's dtype.  On a CPU no row's
    bits depend on the other rows.
    """
    for group in groups:
        here = rows[group.begin : group.end]
        for product in group.products:
            added = _product(x[group.begin : group.end], product)
            part = y[:, product.begin : product.begin + added.shape[1]]
            part.index_add_(0, here, added[:, : part.shape[1]])


def _product(x: Tensor, product: LowRank) -> Tensor:
    """Return x @ down @ up, with the outputs' padding."""
    if x.device.type == "cpu" and x.dtype == torch.float32:
        down, up = product.plan(_packed)
        return float_linear(float_linear(x, down, None), up, None)
    return x @ product.down[:, : product.rank].to(x.dtype) @ product.up.flatten(1).to(x.dtype)


def _packed(product: LowRank) -> tuple[FloatWeight, FloatWeight]:
    """Return both factors for torch's products, whose rows do not depend on each other."""
    down, up = product.down[:, : product.rank], product.up.flatten(1)
    return pack_float(down.t(), None), pack_float(up.t(), None)
