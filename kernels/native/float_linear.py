"""FP32 and bfloat16 weights for the compiled products."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from nightjar.kernels.native.build import compiled, library
from nightjar.kernels.native.huge_pages import in_huge_pages
from nightjar.kernels.native.pointers import INT, POINTER
from nightjar.kernels.native.products import PanelWeight, by_panel, filled_up
from nightjar.kernels.operands import HeadTable, Parts

STORAGE = {torch.float32: "float", torch.bfloat16: "bfloat"}
"""The dtypes of stored weights, each with the prefix of its compiled functions' names."""


@dataclass(frozen=True)
class FloatPanelWeight(PanelWeight):
    """A weight ready for `products.linear`.

    panels: [n, stride / word, channels of a panel, word], a word of 4 bytes; bias: float32[n,
    channels of a panel]; both padded with zeros.  In a gated weight each panel of gates is followed
    by the panel of the gated channels.
    """

    bias: Tensor

    @property
    def kernels(self) -> str:
        """As PanelWeight says."""
        return STORAGE[self.panels.dtype]

    @property
    def panel_width(self) -> int:
        """As PanelWeight says."""
        return self.panels.shape[-2]

    @cached_property
    def apart(self) -> PanelWeight:
        """As PanelWeight says."""
        panels, bias = self.panels.flatten(0, 1), self.bias.flatten(0, 1)
        return FloatPanelWeight(bias.numel(), self.in_features, False, panels, bias)

    def structure(self) -> ctypes.Structure:
        """As PanelWeight says."""
        return _FloatWeightArgument(
            self.panels.data_ptr(),
            self.bias.data_ptr(),
            self.in_features,
            self.stride,
            self.out_features,
            self.gated,
        )

    def table(self, vocab_size: int) -> HeadTable:
        """As LinearWeight says."""
        return PanelTable(self, vocab_size)


@dataclass(frozen=True)
class PanelTable(HeadTable):
    """The first rows of an LM head; rows past vocab_size are zeros."""

    head: FloatPanelWeight
    vocab_size: int

    def rows(self, ids: Tensor) -> Tensor:
        """As HeadTable says."""
        return rows(self.head, ids)


def serves(weight: Tensor) -> bool:
    """Whether the kernels take this weight on this processor."""
    kernels = library() if weight.device.type == "cpu" and weight.dtype == torch.float32 else None
    return kernels is not None and bool(kernels.float_linear_works())


def serves_bfloat16() -> bool:
    """Whether this processor has instructions for bfloat16 that the kernels use."""
    kernels = library()
    return kernels is not None and bool(kernels.bfloat_linear_works())


def pack(
    weight: Tensor, bias: Tensor | None, storage: torch.dtype = torch.float32
) -> FloatPanelWeight:
    """Lay weight float32[out, in] out in panels; storage: float32, or bfloat16 to round it."""
    return _in_panels([(weight, bias)], storage)


def pack_gated(gate: Parts, up: Parts, storage: torch.dtype = torch.float32) -> FloatPanelWeight:
    """Pack two weights [out, in] with their biases for one product: activation(gate) * up."""
    return _in_panels([gate, up], storage)


def rows(weight: FloatPanelWeight, ids: Tensor) -> Tensor:
    """Return the weight's rows of some outputs, as from an embedding table.

    Outputs that the weight does not have give zeros: int64[T] -> float32[T, in].
    """
    if weight.gated or ids.dtype != torch.int64:
        raise ValueError(f"rows of {ids.dtype} ids; gated: {weight.gated}")
    if ids.numel() and int(ids.min()) < 0:
        raise IndexError(f"id {int(ids.min())}: from 0 on")
    ids, out = ids.contiguous(), torch.empty(ids.shape[0], weight.in_features)
    function = _rows_function(weight.kernels)
    function(weight.address, ids.data_ptr(), ids.shape[0], out.data_ptr())
    return out


class _FloatWeightArgument(ctypes.Structure):
    """A weight as float_product.h takes it."""

    _fields_ = (
        *((name, POINTER) for name in ("panels", "bias")),
        *((name, INT) for name in ("inputs", "stride", "columns", "gated")),
    )


def _in_panels(parts: list[Parts], storage: torch.dtype) -> FloatPanelWeight:
    """Pack weights of one shape, a panel of each in turn."""
    if storage == torch.bfloat16 and not serves_bfloat16():
        raise ValueError("this processor has no products of bfloat16 that the kernels use")
    out_features, in_features = parts[0][0].shape
    kernels = compiled()
    width, word = int(kernels.float_panel_columns()), 4 // storage.itemsize
    n, whole = -(-out_features // width), out_features // width
    stride = filled_up(in_features, storage.itemsize)
    shape = n, len(parts), stride // word, width, word
    panels = in_huge_pages(torch.empty(shape, dtype=storage))
    # Zeros only where no weight is: to clear all of it took a fifth of the loading.
    panels[:, :, in_features // word :] = 0
    panels[whole:] = 0
    biases = torch.zeros(n, len(parts), width)
    for index, (weight, bias) in enumerate(parts):
        # By input: [n, stride, width]; the numbers of a word are not neighbours yet.
        inputs = panels[:, index].transpose(2, 3)
        for k in range(word):
            every = weight[:, k::word]
            here = inputs[:, : every.shape[1], k]
            channels = every[: whole * width].view(whole, width, every.shape[1])
            here[:whole] = channels.transpose(1, 2)
            if whole < n:
                rest = every[whole * width :]
                here[whole, :, : rest.shape[0]] = rest.t()
        if bias is not None:
            biases[:, index] = by_panel(bias, n, width)
    return FloatPanelWeight(out_features, in_features, len(parts) == 2, panels, biases)


@cache
def _rows_function(kind: str) -> ctypes._NamedFuncPointer:
    function: ctypes._NamedFuncPointer = getattr(compiled(), f"{kind}_rows")
    function.argtypes = [POINTER, POINTER, INT, POINTER]
    function.restype = None
    return function
