"""Weights on a GPU: `linear.py` multiplies few rows, cuBLAS through torch multiplies more.

Weights in FP8 are those of `fp8_packing.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from nightjar.kernels.cuda import fp8_packing
from nightjar.kernels.cuda.activation import activation as apply_activation
from nightjar.kernels.cuda.linear import (
    STORAGE,
    Factor,
    Next,
    followers,
    linear,
    linear_onto,
    normed_linear,
    serves_norm,
    serves_rows,
)
from nightjar.kernels.cuda.switches import current
from nightjar.kernels.low_rank import Added
from nightjar.kernels.operands import (
    NARROW,
    LinearWeight,
    Norm,
    Parts,
    WeightPrecision,
    Wide,
)
from nightjar.kernels.reference.scaled_rows import scaled_rows


@dataclass(frozen=True)
class DeviceWeight(LinearWeight):
    """data: [out, in]; following: the weights that a decode step reads next, where known.

    wide: of FP16 weights: what stays in FP32, at every number of rows.
    """

    data: Tensor
    bias: Tensor | None
    following: Next = ()
    wide: Wide = NARROW

    @property
    def factor(self) -> Factor:
        """Data and bias."""
        return Factor(self.data, self.bias)

    @property
    def rows_dtype(self) -> torch.dtype:
        """As LinearWeight says."""
        return torch.float32 if self.wide.rows else self.data.dtype

    @property
    def prefetched(self) -> tuple[Tensor, ...]:
        """As LinearWeight says."""
        return (self.data,)

    def followed_by(self, after: LinearWeight) -> DeviceWeight:
        """As LinearWeight says."""
        found = followers(after)
        return self if found is None else replace(self, following=found)

    def linear(self, x: Tensor, activation: str | None, out_dtype: torch.dtype | None) -> Tensor:
        """As LinearWeight says; what is to be FP32 is not rounded to 16 bits before."""
        if self.is_wide(x) or (out_dtype == torch.float32 and self.data.dtype in STORAGE):
            y = self.wide_product(x)
            y = y if activation is None else apply_activation(y, activation)
            wants_wide = self.wide.results or out_dtype == torch.float32
            y = y if wants_wide else y.to(self.data.dtype)
        elif _is_small(x, self.data):
            y = linear(x, self.factor, activation, following=self.following)
        else:
            y = F.linear(x, self.data, self.bias)
            y = y if activation is None else apply_activation(y, activation)
        return y if out_dtype is None else y.to(out_dtype)

    def linear_onto(self, residual: Tensor, x: Tensor, added: Added | None = None) -> bool:
        """As LinearWeight says, for few rows, or where results are wide."""
        if added is not None:
            return False
        if self.wide.results and not (self._has_factor(x) and _is_small(x, self.data)):
            residual.add_(self.wide_product(x))
            return True
        if not _is_small(x, self.data):
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
        """As LinearWeight says, for few rows and without a delta, where nothing is wide."""
        if delta is not None or added is not None:
            return None
        if self.wide != NARROW or not _is_small_normed(residual, self.data):
            return None
        y = normed_linear(residual, norm, self.factor, activation, None, self.following)
        return y.to(out_dtype)

    def _has_factor(self, x: Tensor) -> bool:
        """Whether rows and bias have the weight's dtype, as the kernel takes them."""
        bias = self.bias
        return x.dtype == self.data.dtype and (bias is None or bias.dtype == x.dtype)

    def is_wide(self, x: Tensor) -> bool:
        """Whether a product of x [T, in] is computed as `wide_product`."""
        return self.wide.results or x.dtype != self.data.dtype

    def wide_product(self, x: Tensor) -> Tensor:
        """Multiply x [T, in], in FP16 or in FP32, and add the bias: float32[T, out]."""
        scale = None
        if x.dtype == torch.float32 and self.data.dtype == torch.float16:
            x, scale = scaled_rows(x)
        if _is_small(x, self.data):
            y = linear(x, Factor(self.data), following=self.following, wide=True)
        elif x.is_cuda:
            y = torch.mm(x, self.data.t(), out_dtype=torch.float32)
        else:  # tests run the kernels on the CPU
            y = x.float() @ self.data.float().t()
        y = y if scale is None else y * scale
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class GatedDeviceWeight(LinearWeight):
    """Two weights of one shape; `up` holds the following weights."""

    gate: DeviceWeight
    up: DeviceWeight

    @property
    def rows_dtype(self) -> torch.dtype:
        """As LinearWeight says."""
        return self.up.rows_dtype

    @property
    def prefetched(self) -> tuple[Tensor, ...]:
        """As LinearWeight says."""
        return self.gate.data, self.up.data

    def followed_by(self, after: LinearWeight) -> GatedDeviceWeight:
        """As LinearWeight says."""
        return replace(self, up=self.up.followed_by(after))

    def linear(self, x: Tensor, activation: str | None, out_dtype: torch.dtype | None) -> Tensor:
        """As LinearWeight says."""
        gate, up = self.gate, self.up
        if up.is_wide(x):
            if activation is None:
                raise ValueError("a gated product without an activation: name one")
            y = apply_activation(gate.wide_product(x), activation, up=up.wide_product(x))
            y = y if up.wide.results else y.to(up.data.dtype)
        elif _is_small(x, up.data):
            y = linear(x, up.factor, activation, gate.factor, up.following)
        else:
            if activation is None:
                raise ValueError("a gated product without an activation: name one")
            products = [F.linear(x, one.data, one.bias) for one in (gate, up)]
            y = apply_activation(products[0], activation, up=products[1])
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
        """As LinearWeight says, for few rows and without a delta."""
        gate, up = self.gate, self.up
        if delta is not None or added is not None:
            return None
        if up.wide != NARROW or not _is_small_normed(residual, up.data):
            return None
        y = normed_linear(residual, norm, up.factor, activation, gate.factor, up.following)
        return y.to(out_dtype)


def pack_linear(
    weight: Tensor,
    bias: Tensor | None,
    precision: WeightPrecision = "float",
    wide: Wide = NARROW,
) -> LinearWeight:
    """As reference.packing.pack_linear: rows of weights stay in their order."""
    if precision == "fp8":
        return fp8_packing.pack(weight, bias)
    return _packed(weight, bias, precision, wide)


def pack_gated(
    gate: Parts, up: Parts, precision: WeightPrecision = "float", wide: Wide = NARROW
) -> LinearWeight:
    """As reference.packing.pack_gated."""
    if precision == "fp8":
        return fp8_packing.pack_gated(gate, up)
    pair = _packed(*gate, precision, wide), _packed(*up, precision, wide)
    return GatedDeviceWeight(pair[1].out_features, *pair)


def _packed(
    weight: Tensor, bias: Tensor | None, precision: WeightPrecision, wide: Wide
) -> DeviceWeight:
    """Pack a weight as it is."""
    if precision != "float":
        raise ValueError(
            f"{precision}: there are no CUDA kernels for products in it; use bf16, fp16 or fp8"
        )
    if weight.is_cuda:
        sum_in_fp32()
    wide = wide if weight.dtype == torch.float16 else NARROW
    return DeviceWeight(weight.shape[0], weight.contiguous(), bias, wide=wide)


def sum_in_fp32() -> None:
    """Let cuBLAS add up the parts of a split 16-bit product in FP32, in the whole process.

    By default torch lets it round such parts to 16 bits, where they lose digits and may overflow.
    """
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _is_small(x: Tensor, weight: Tensor) -> bool:
    """Whether x has so few rows that the kernel multiplies them, and it is not switched off."""
    return current().small_products and serves_rows(x, weight)


def _is_small_normed(residual: Tensor, weight: Tensor) -> bool:
    """The same for the kernel that normalises the stream first."""
    return current().small_products and serves_norm(residual, weight)
