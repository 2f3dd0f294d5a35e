"""Weights in FP8 on a GPU: `linear.py` multiplies few rows, torch's scaled product multiplies more.

Both round a row to the same codes with the same scale.  They differ in how they add up products:
`linear.py` does so in FP32, as tensor cores of 16 bits do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType

from nightjar.kernels.cuda.activation import activation as apply_activation
from nightjar.kernels.cuda.device import sums_in_fp8
from nightjar.kernels.cuda.linear import (
    Factor,
    Next,
    followers,
    linear,
    linear_onto,
    normed_linear,
    serves_norm,
    serves_rows,
)
from nightjar.kernels.cuda.norm import normed_rows
from nightjar.kernels.cuda.product_rows import ROUNDED, Fp8Rows, round_rows
from nightjar.kernels.cuda.switches import current
from nightjar.kernels.low_rank import Added
from nightjar.kernels.operands import LinearWeight, Norm, Parts
from nightjar.kernels.reference.fp8_linear import quantised

MULTIPLE = 16
"""cuBLAS takes inputs and channels of such a number."""

_E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Fp8DeviceWeight(LinearWeight):
    """codes: uint8[N, K], e4m3; scales: float32[N]; bias: bfloat16[N] or None.

    N, K: out_features and in_features, filled up with zeros to a MULTIPLE.
    following: the weights that a decode step reads next, where known.
    """

    in_features: int
    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    following: Next = ()

    @property
    def rows_dtype(self) -> torch.dtype:
        """As LinearWeight says."""
        return ROUNDED

    @property
    def factor(self) -> Factor:
        """What `linear.py` multiplies with."""
        bias, n = self.bias, self.out_features
        return Factor(self.codes[:n], None if bias is None else bias[:n], self.scales[:n])

    @property
    def prefetched(self) -> tuple[Tensor, ...]:
        """As LinearWeight says."""
        return (self.codes,)

    def followed_by(self, after: LinearWeight) -> Fp8DeviceWeight:
        """As LinearWeight says."""
        found = followers(after)
        return self if found is None else replace(self, following=found)

    def linear(self, x: Tensor, activation: str | None, out_dtype: torch.dtype | None) -> Tensor:
        """As LinearWeight says; bfloat16 where no dtype is asked for."""
        x = x.to(ROUNDED)
        if self.is_small(x):
            wide = out_dtype == torch.float32
            y = linear(x, self.factor, activation, following=self.following, wide=wide)
        else:
            y = self.product(self.rounded(x), out_dtype)
            y = y if activation is None else apply_activation(y, activation)
        return y if out_dtype is None else y.to(out_dtype)

    def linear_onto(self, residual: Tensor, x: Tensor, added: Added | None = None) -> bool:
        """As LinearWeight says, for few rows."""
        x = x.to(ROUNDED)
        if added is not None or not self.is_small(x):
            return False
        linear_onto(residual, x, self.factor, self.following)
        return True

    def normed_linear(
        self,
        residual: Tensor,
        delta: Tensor | None,
        norm: Norm,
        activation: str | None,
        out_dtype: torch.dtype,
        added: Added | None = None,
    ) -> Tensor | None:
        """As LinearWeight says, for few rows without a delta and for many rows."""
        if added is not None:
            return None
        if self.is_small_normed(residual, delta):
            y = normed_linear(residual, norm, self.factor, activation, None, self.following)
            return y.to(out_dtype)
        rows = self.normed(residual, delta, norm)
        if rows is None:
            return None
        y = self.product(rows, None)  # as without adapters, which ask for FP32
        return (y if activation is None else apply_activation(y, activation)).to(out_dtype)

    def is_small(self, x: Tensor) -> bool:
        """Whether `linear.py` multiplies x [T, in] or a stream of that shape: few rows."""
        whole = self.codes.shape[1] == self.in_features
        return whole and current().small_products and serves_rows(x, self.codes)

    def is_small_normed(self, residual: Tensor, delta: Tensor | None) -> bool:
        """Whether it normalises the stream too."""
        return delta is None and self.is_small(residual) and serves_norm(residual, self.codes)

    def rounded(self, x: Tensor) -> Fp8Rows:
        """Round x [T, in] to FP8."""
        return round_rows(x, self.codes.shape[1])

    def normed(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Fp8Rows | None:
        """Add delta to the stream, normalise it and round it to FP8.

        Returns None, and does nothing, where `linear.py` is to multiply the normalised rows, or
        rows are filled up.
        """
        if self.is_small(residual) or self.codes.shape[1] != self.in_features:
            return None
        return normed_rows(residual, delta, norm)

    def product(self, rows: Fp8Rows, out_dtype: torch.dtype | None) -> Tensor:
        """Multiply rows with the weight and add the bias: float32[T, out] if asked for, else
        bfloat16.

        Where torch does not give float32, sums are rounded to bfloat16 first.
        """
        wide = out_dtype == torch.float32  # to which torch adds no bias
        y = F.scaled_mm(
            rows.codes.view(_E4M3),
            self.codes.view(_E4M3).t(),
            rows.scales.unsqueeze(1),
            ScalingType.RowWise,
            self.scales.unsqueeze(0),
            ScalingType.RowWise,
            bias=None if wide else self.bias,
            output_dtype=sums_in_fp8(self.codes) if wide else ROUNDED,
        )
        if wide:
            y = y.float()
            y = y if self.bias is None else y + self.bias
        return y if y.shape[1] == self.out_features else y[:, : self.out_features].contiguous()


@dataclass(frozen=True)
class GatedFp8Weight(LinearWeight):
    """Two weights of one shape; `up` holds the following weights."""

    gate: Fp8DeviceWeight
    up: Fp8DeviceWeight

    @property
    def rows_dtype(self) -> torch.dtype:
        """As LinearWeight says."""
        return ROUNDED

    @property
    def prefetched(self) -> tuple[Tensor, ...]:
        """As LinearWeight says."""
        return self.gate.codes, self.up.codes

    def followed_by(self, after: LinearWeight) -> GatedFp8Weight:
        """As LinearWeight says."""
        return replace(self, up=self.up.followed_by(after))

    def linear(self, x: Tensor, activation: str | None, out_dtype: torch.dtype | None) -> Tensor:
        """As LinearWeight says."""
        gate, up, x = self.gate, self.up, x.to(ROUNDED)
        if up.is_small(x):
            y = linear(x, up.factor, activation, gate.factor, up.following)
        else:
            y = self._gated(up.rounded(x), activation)
        return y if out_dtype is None else y.to(out_dtype)

    def unactivated(self, x: Tensor) -> tuple[Tensor, ...]:
        """As LinearWeight says."""
        return self.gate.linear(x, None, None), self.up.linear(x, None, None)

    def normed_linear(
        self,
        residual: Tensor,
        delta: Tensor | None,
        norm: Norm,
        activation: str | None,
        out_dtype: torch.dtype,
        added: Added | None = None,
    ) -> Tensor | None:
        """As LinearWeight says, for few rows without a delta and for many rows."""
        gate, up = self.gate, self.up
        if added is not None:
            return None
        if up.is_small_normed(residual, delta):
            y = normed_linear(residual, norm, up.factor, activation, gate.factor, up.following)
            return y.to(out_dtype)
        rows = up.normed(residual, delta, norm)
        return None if rows is None else self._gated(rows, activation).to(out_dtype)

    def _gated(self, rows: Fp8Rows, activation: str | None) -> Tensor:
        """Multiply rows with both weights: bfloat16[T, out]."""
        if activation is None:
            raise ValueError("a gated product without an activation: name one")
        gate, up = self.gate.product(rows, None), self.up.product(rows, None)
        return apply_activation(gate, activation, up=up)


def pack(weight: Tensor, bias: Tensor | None) -> Fp8DeviceWeight:
    """Quantise weight [out, in] by output channel, on its device; the original may be dropped."""
    out_features, in_features = weight.shape
    codes, scales = quantised(weight)
    more = -out_features % MULTIPLE
    return Fp8DeviceWeight(
        out_features,
        in_features,
        F.pad(codes, (0, -in_features % MULTIPLE, 0, more)),
        F.pad(scales, (0, more)),
        None if bias is None else F.pad(bias.to(ROUNDED), (0, more)),
    )


def pack_gated(gate: Parts, up: Parts) -> GatedFp8Weight:
    """Quantise two weights of one shape as a gated weight."""
    pair = pack(*gate), pack(*up)
    return GatedFp8Weight(pair[1].out_features, *pair)
