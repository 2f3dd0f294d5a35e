"""Products with weights in panels, compiled.  Rows are in FP32 or half precision."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from nightjar.kernels.low_rank import Added, Place
from nightjar.kernels.native import low_rank, norm
from nightjar.kernels.native.build import compiled
from nightjar.kernels.native.norm import NormArgument, norm_argument
from nightjar.kernels.native.pointers import INT, POINTER
from nightjar.kernels.operands import LinearWeight, Norm

RUN_BYTES = 64
"""Of a row's neighbouring inputs that lie together: kRun in product.h.  Rows are whole runs."""

ACTIVATIONS = {None: 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "silu": 4}

_NUMBERS = {torch.float32: 0, torch.float16: 1}
_FLOATS, _ADDENDS = 0, 2
"""The numbers of a row, as in product.h."""


@dataclass(frozen=True)
class PanelWeight(LinearWeight):
    """A weight in panels of neighbouring output channels; gated: with their gates."""

    in_features: int
    gated: bool
    panels: Tensor

    @property
    @abstractmethod
    def kernels(self) -> str:
        """The prefix of its compiled functions' names."""

    @property
    def stride(self) -> int:
        """Inputs, padded to whole runs."""
        return filled_up(self.in_features, self.panels.itemsize)

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs."""
        return self.in_features, self.out_features

    @abstractmethod
    def structure(self) -> ctypes.Structure:
        """The weight as the kernels take it."""

    @cached_property
    def _structure(self) -> ctypes.Structure:
        return self.structure()

    @cached_property
    def address(self) -> int:
        """The address of the C structure; the caller must keep the weight."""
        return ctypes.addressof(self._structure)

    @property
    def rows_dtype(self) -> torch.dtype:
        """As LinearWeight says."""
        return torch.float32

    def linear(self, x: Tensor, activation: str | None, out_dtype: torch.dtype | None) -> Tensor:
        """As LinearWeight says; float32 where no dtype is asked for."""
        if activation is None:
            return linear(x, self, out_dtype or torch.float32)
        y = activated_linear(x, self, activation)
        return y if out_dtype is None else y.to(out_dtype)

    def unactivated(self, x: Tensor) -> tuple[Tensor, ...]:
        """As LinearWeight says."""
        if not self.gated:
            return (linear(x, self, torch.float32),)
        apart = self.apart
        # By panel: the channels of the gates, then the gated ones.
        y = linear(x, apart, torch.float32).view(x.shape[0], -1, 2, self.panel_width)
        gates, gated = (y[:, :, part].flatten(1)[:, : self.out_features] for part in (0, 1))
        return gates.contiguous(), gated.contiguous()

    @property
    @abstractmethod
    def panel_width(self) -> int:
        """Output channels of a panel; of a gated weight, those of either kind."""

    @property
    @abstractmethod
    def apart(self) -> PanelWeight:
        """The same numbers as a weight that is not gated: every panel's gates and gated channels.

        Its outputs are those of whole panels.
        """

    def adapted_linear(self, x: Tensor, added: Added) -> Tensor | None:
        """As LinearWeight says."""
        out = x.new_empty(x.shape[0], self.out_features, dtype=torch.float32)
        _linear(x, self, None, out, _FLOATS, added)
        return out

    def linear_onto(self, residual: Tensor, x: Tensor, added: Added | None = None) -> bool:
        """As LinearWeight says."""
        if not serves_stream(residual, None):
            return False
        linear_onto(residual, x, self, added)
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
        """As LinearWeight says; without an activation."""
        if activation is not None or not serves_stream(residual, delta):
            return None
        return normed_linear(residual, delta, norm, self, out_dtype, added)

    def feed_forward(
        self,
        residual: Tensor,
        delta: Tensor | None,
        norm: Norm,
        down: LinearWeight,
        activation: str,
        added: Added | None = None,
    ) -> Tensor | None:
        """As LinearWeight says: float32[T, H], where both weights are of one kind."""
        if not isinstance(down, type(self)) or not serves_stream(residual, delta):
            return None
        return feed_forward(residual, delta, norm, self, down, activation, added)

    def feed_forward_onto(
        self,
        residual: Tensor,
        delta: Tensor | None,
        norm: Norm,
        down: LinearWeight,
        activation: str,
        added: Added | None = None,
    ) -> bool:
        """As LinearWeight says, where both weights are of one kind."""
        if not isinstance(down, type(self)) or not serves_stream(residual, delta):
            return False
        feed_forward_onto(residual, delta, norm, self, down, activation, added)
        return True


def serves_stream(residual: Tensor, delta: Tensor | None) -> bool:
    """Whether the other products take the residual stream [T, H]."""
    return norm.serves(residual, delta, torch.float32)


def linear(x: Tensor, weight: PanelWeight, out_dtype: torch.dtype) -> Tensor:
    """Multiply x [T, in] by the weight, add its bias: out_dtype[T, out], float32 or float16."""
    out = x.new_empty(x.shape[0], weight.out_features, dtype=out_dtype)
    _linear(x, weight, None, out, _NUMBERS[out_dtype])
    return out


def activated_linear(x: Tensor, weight: PanelWeight, activation: str) -> Tensor:
    """Compute `linear` with the activation, in a gated weight of the gate: float32[T, out]."""
    out = x.new_empty(x.shape[0], weight.out_features, dtype=torch.float32)
    _linear(x, weight, activation, out, _FLOATS)
    return out


def linear_onto(
    residual: Tensor, x: Tensor, weight: PanelWeight, added: Added | None = None
) -> None:
    """Add `linear` of x to the residual stream, in place."""
    if residual.shape != (x.shape[0], weight.out_features):
        raise ValueError(
            f"{x.shape[0]} rows of {weight.out_features} go onto a stream {list(residual.shape)}"
        )
    _linear(x, weight, None, residual, _ADDENDS, added)


def normed_linear(
    residual: Tensor,
    delta: Tensor | None,
    norm: Norm,
    weight: PanelWeight,
    out_dtype: torch.dtype,
    added: Added | None = None,
) -> Tensor:
    """Compute `linear` of the normalised residual stream; out_dtype: float32 or float16."""
    _check_stream(residual, norm, weight)
    n_rows = residual.shape[0]
    out = residual.new_empty(n_rows, weight.out_features, dtype=out_dtype)
    _functions(weight.kernels).normed_linear(
        residual.data_ptr(),
        None if delta is None else delta.data_ptr(),
        n_rows,
        norm.plan(norm_argument),
        weight.address,
        out.data_ptr(),
        _NUMBERS[out_dtype],
        *low_rank.argument(added, n_rows, {Place.QUERY_KEY_VALUE: weight.shape}),
    )
    return out


def feed_forward(
    residual: Tensor,
    delta: Tensor | None,
    norm: Norm,
    up: PanelWeight,
    down: PanelWeight,
    activation: str,
    added: Added | None = None,
) -> Tensor:
    """Compute a feed-forward block: float32[T, H]; both weights are of one kind."""
    out = residual.new_empty(residual.shape[0], down.out_features)
    _feed_forward((residual, delta, norm), up, down, activation, out, _FLOATS, added)
    return out


def feed_forward_onto(
    residual: Tensor,
    delta: Tensor | None,
    norm: Norm,
    up: PanelWeight,
    down: PanelWeight,
    activation: str,
    added: Added | None = None,
) -> None:
    """Add a feed-forward block to the residual stream; both weights are of one kind."""
    if down.out_features != residual.shape[1]:
        raise ValueError(f"{down.out_features} channels go onto a stream of {residual.shape[1]}")
    _feed_forward((residual, delta, norm), up, down, activation, residual, _ADDENDS, added)


def filled_up(inputs: int, itemsize: int) -> int:
    """Return the inputs, padded to whole runs of numbers of `itemsize` bytes."""
    run = RUN_BYTES // itemsize
    return -(-inputs // run) * run


def by_panel(x: Tensor, panels: int, width: int) -> Tensor:
    """Return x [out] padded with zeros to whole panels: [panels, width]."""
    padded = x.new_zeros(panels * width)
    padded[: x.shape[0]] = x
    return padded.view(panels, width)


def _linear(
    x: Tensor,
    weight: PanelWeight,
    activation: str | None,
    out: Tensor,
    out_numbers: int,
    added: Added | None = None,
) -> None:
    if x.shape[1] != weight.in_features or x.dtype not in _NUMBERS:
        raise ValueError(f"{x.dtype}{list(x.shape)}: float32 or float16 [T, {weight.in_features}]")
    if x.stride(1) != 1:
        x = x.contiguous()
    _functions(weight.kernels).linear(
        x.data_ptr(),
        _NUMBERS[x.dtype],
        x.stride(0),
        x.shape[0],
        weight.address,
        ACTIVATIONS[activation],
        out.data_ptr(),
        out_numbers,
        *low_rank.argument(added, x.shape[0], {Place.ATTENTION_OUT: weight.shape}),
    )


def _feed_forward(
    stream: tuple[Tensor, Tensor | None, Norm],
    up: PanelWeight,
    down: PanelWeight,
    activation: str,
    out: Tensor,
    out_numbers: int,
    added: Added | None,
) -> None:
    residual, delta, norm = stream
    _check_stream(residual, norm, up)
    if down.in_features != up.out_features:
        raise ValueError(f"{up.out_features} channels go up, {down.in_features} come down")
    _functions(up.kernels).feed_forward(
        residual.data_ptr(),
        None if delta is None else delta.data_ptr(),
        residual.shape[0],
        norm.plan(norm_argument),
        up.address,
        ACTIVATIONS[activation],
        down.address,
        out.data_ptr(),
        out_numbers,
        *low_rank.argument(added, residual.shape[0], {Place.UP: up.shape, Place.DOWN: down.shape}),
    )


def _check_stream(residual: Tensor, norm: Norm, weight: PanelWeight) -> None:
    width = norm.weight.shape[0]
    if not residual.shape[1] == width == weight.in_features:
        raise ValueError(
            f"rows of {residual.shape[1]}, a norm of {width}, "
            f"a weight of {weight.in_features} inputs"
        )


class _Functions(NamedTuple):
    """The compiled functions for weights of one kind."""

    linear: ctypes._NamedFuncPointer
    normed_linear: ctypes._NamedFuncPointer
    feed_forward: ctypes._NamedFuncPointer


@cache
def _functions(kind: str) -> _Functions:
    kernels = compiled()
    stream = (POINTER, POINTER, INT, ctypes.POINTER(NormArgument))
    functions = _Functions(*(getattr(kernels, f"{kind}_{name}") for name in _Functions._fields))
    added = (POINTER, INT)
    functions.linear.argtypes = (POINTER, INT, INT, INT, POINTER, INT, POINTER, INT, *added)
    functions.normed_linear.argtypes = (*stream, POINTER, POINTER, INT, *added)
    functions.feed_forward.argtypes = (*stream, POINTER, INT, POINTER, POINTER, INT, *added)
    for function in functions:
        function.restype = None
    return functions
