"""Weights on a GPU: `linear.py` multiplies few rows, cuBLAS through torch multiplies more."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from nightjar.kernels.cuda.activation import activation as apply_activation
from nightjar.kernels.cuda.linear import (
    Factor,
    Next,
    linear,
    linear_onto,
    normed_linear,
    serves_norm,
    serves_rows,
    serves_weight,
)
from nightjar.kernels.cuda.switches import current
from nightjar.kernels.operands import LinearWeight, Norm, Parts, WeightPrecision


@dataclass(frozen=True)
class DeviceWeight(LinearWeight):
    """data: [out, in]; following: the weights that a decode step reads next, where known."""

    data: Tensor
    bias: Tensor | None
    following: Next = ()

    @property
    def factor(self) -> Factor:
        """Data and bias."""
        return self.data, self.bias

    @property
    def rows_dtype(self) -> torch.dtype:
        """As LinearWeight says."""
        return self.data.dtype

    @property
    def prefetched(self) -> tuple[Tensor, ...]:
        """As LinearWeight says."""
        return (self.data,)

    def followed_by(self, after: LinearWeight) -> DeviceWeight:
        """As LinearWeight says."""
        found = _following(after)
        return self if found is None else replace(self, following=found)

    def linear(self, x: Tensor, activation: str | None, out_dtype: torch.dtype | None) -> Tensor:
        """As LinearWeight says."""
        if _is_small(x, self.data):
            y = linear(x, self.factor, activation, following=self.following)
        else:
            y = F.linear(x, self.data, self.bias)
            y = y if activation is None else apply_activation(y, activation)
        return y if out_dtype is None else y.to(out_dtype)

    def linear_onto(self, residual: Tensor, x: Tensor) -> bool:
        """As LinearWeight says, for few rows."""
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
    ) -> Tensor | None:
        """As LinearWeight says, for few rows and without a delta."""
        if delta is not None or not _is_small_normed(residual, self.data):
            return None
        y = normed_linear(residual, norm, self.factor, activation, None, self.following)
        return y.to(out_dtype)


@dataclass(frozen=True)
class GatedDeviceWeight(LinearWeight):
    """Two weights of one shape; `up` holds the following weights."""

    gate: DeviceWeight
    up: DeviceWeight

    @property
    def rows_dtype(self) -> torch.dtype:
        """As LinearWeight says."""
        return self.up.data.dtype

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
        if _is_small(x, up.data):
            y = linear(x, up.factor, activation, gate.factor, up.following)
        else:
            if activation is None:
                raise ValueError("a gated product without an activation: name one")
            y = apply_activation(F.linear(x, *gate.factor), activation, up=F.linear(x, *up.factor))
        return y if out_dtype is None else y.to(out_dtype)

    def normed_linear(
        self,
        residual: Tensor,
        delta: Tensor | None,
        norm: Norm,
        activation: str | None,
        out_dtype: torch.dtype,
    ) -> Tensor | None:
        """As LinearWeight says, for few rows and without a delta."""
        gate, up = self.gate, self.up
        if delta is not None or not _is_small_normed(residual, up.data):
            return None
        y = normed_linear(residual, norm, up.factor, activation, gate.factor, up.following)
        return y.to(out_dtype)


def pack_linear(
    weight: Tensor, bias: Tensor | None, precision: WeightPrecision = "float"
) -> DeviceWeight:
    """As reference.packing.pack_linear: the rows stay as they are."""
    if precision != "float":
        raise ValueError(
            f"{precision}: there are no CUDA kernels for products in it; use bf16 or fp16"
        )
    if weight.is_cuda:
        sum_in_fp32()
    return DeviceWeight(weight.shape[0], weight.contiguous(), bias)


def pack_gated(gate: Parts, up: Parts, precision: WeightPrecision = "float") -> GatedDeviceWeight:
    """As reference.packing.pack_gated."""
    pair = pack_linear(*gate, precision), pack_linear(*up, precision)
    return GatedDeviceWeight(pair[1].out_features, *pair)


def sum_in_fp32() -> None:
    """Let cuBLAS add up the parts of a split 16-bit product in FP32, in the whole process.

    By default torch lets it round such parts to 16 bits, where they lose digits and may overflow.
    """
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _following(after: LinearWeight) -> Next | None:
    """Return what to prefetch of a weight; None where the kernel cannot prefetch it."""
    found = after.prefetched
    return found if all(map(serves_weight, found)) else None


def _is_small(x: Tensor, weight: Tensor) -> bool:
    """Whether x has so few rows that the kernel multiplies them, and it is not switched off."""
    return current().small_products and serves_rows(x, weight)


def _is_small_normed(residual: Tensor, weight: Tensor) -> bool:
    """The same for the kernel that normalises the stream first."""
    return current().small_products and serves_norm(residual, weight)
