"""What numbers a model is computed in, and which are the fastest on this processor."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nightjar.kernels import (
    GatedWeight,
    LinearWeight,
    WeightPrecision,
    linear,
    pack_gated,
    pack_linear,
)


@dataclass(frozen=True, slots=True)
class Precision:
    """dtype: activations and tables; cache: keys and values; weights: how the matrix products are
    computed."""

    dtype: torch.dtype
    cache: torch.dtype
    weights: WeightPrecision = "float"

    def pack(self, weight: Tensor, bias: Tensor | None) -> LinearWeight:
        """Weight [out, in] and bias [out], made ready for products in this precision."""
        return pack_linear(weight, bias, self.weights)

    def pack_gated(
        self, gate: tuple[Tensor, Tensor | None], up: tuple[Tensor, Tensor | None]
    ) -> GatedWeight:
        """The same for a gated pair."""
        return pack_gated(gate, up, self.weights)


PRECISIONS = {
    "fp64": Precision(torch.float64, cache=torch.float64),
    "fp32": Precision(torch.float32, cache=torch.float32),
    "bf16": Precision(torch.bfloat16, cache=torch.bfloat16),
    "fp16": Precision(torch.float16, cache=torch.float16),
    # FP16 rounds more finely than the products do, and decode is bound by reading the cache.
    "int8": Precision(torch.float32, cache=torch.float16, weights="int8"),
}

GPU_PRECISIONS = ("fp32", "bf16", "fp16")
"""Those that the CUDA kernels compute in."""

MORE_PRECISE = {"int8": "fp32", "bf16": "fp32", "fp16": "fp32", "fp32": "fp64"}
"""In which precision a request is computed again whose scores were not finite."""

ADVANTAGE = 1.25
"""bf16 must be this much faster than fp32 to be chosen: noise must not decide, and where there is
little to win fp32 is the more exact."""

# The smallest product of a GPT-2-small block, at the rows of a half-filled decode step.
_ROWS, _IN, _OUT = 32, 768, 768
# On a busy host threads lose whole time slices: single products met calm ones in one dtype alone.
_TURNS, _PER_TURN = 8, 16


def fastest_dtype(product: Callable[[torch.dtype], float] | None = None) -> str:
    """ "bf16" where its products are clearly faster than fp32's on this processor, else "fp32".

    product: the seconds of one product in a dtype; by default one is run and timed. The two take
    turns of several products, so that a busy moment meets both and both find calm ones; the best
    times are compared.
    """
    if product is None:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "fp32"
        product = _PackedProduct()
    fp32_s = bf16_s = math.inf
    for _ in range(_TURNS):
        fp32_s = min(fp32_s, *(product(torch.float32) for _ in range(_PER_TURN)))
        bf16_s = min(bf16_s, *(product(torch.bfloat16) for _ in range(_PER_TURN)))
    return "bf16" if bf16_s * ADVANTAGE <= fp32_s else "fp32"


class _PackedProduct:
    """Times one packed product, with the weights packed and the kernels built beforehand."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(_OUT, _IN, generator=generator)
        rows = torch.randn(_ROWS, _IN, generator=generator)
        self._operands = {
            dtype: (rows.to(dtype), pack_linear(weight.to(dtype), None))
            for dtype in (torch.float32, torch.bfloat16)
        }
        for dtype in self._operands:
            self(dtype)

    def __call__(self, dtype: torch.dtype) -> float:
        rows, weight = self._operands[dtype]
        started = time.perf_counter()
        linear(rows, weight)
        return time.perf_counter() - started
