"""The precisions that a model is computed in, and the fastest one on this processor."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nightjar.kernels import (
    NARROW,
    LinearWeight,
    WeightPrecision,
    Wide,
    linear,
    pack_gated,
    pack_linear,
    serves_bfloat16,
)


@dataclass(frozen=True, slots=True)
class Precision:
    """dtype: of activations and tables; cache: of keys and values; weights: of matrix products.

    whole_head: the LM head's products are in the activations' dtype, as the embedding table is.
    """

    dtype: torch.dtype
    cache: torch.dtype
    weights: WeightPrecision = "float"
    whole_head: bool = False

    def pack(
        self, weight: Tensor, bias: Tensor | None, wide: Wide = NARROW, *, exact: bool = False
    ) -> LinearWeight:
        """Pack weight [out, in] and bias [out] for products in this precision.

        wide: what stays in FP32 of products in FP16.  exact: products in the activations' dtype.
        """
        return pack_linear(weight, bias, "float" if exact else self.weights, wide)

    def pack_gated(
        self,
        gate: tuple[Tensor, Tensor | None],
        up: tuple[Tensor, Tensor | None],
        wide: Wide = NARROW,
        *,
        exact: bool = False,
    ) -> LinearWeight:
        """Pack a gated weight, as `pack` does."""
        return pack_gated(gate, up, "float" if exact else self.weights, wide)


PRECISIONS = {
    "fp64": Precision(torch.float64, cache=torch.float64),
    "fp32": Precision(torch.float32, cache=torch.float32),
    "bf16": Precision(torch.bfloat16, cache=torch.bfloat16),
    "fp16": Precision(torch.float16, cache=torch.float16),
    # FP16 rounds more finely than the products do, and decode is bound by reading the cache.
    "int8": Precision(torch.float32, cache=torch.float16, weights="int8"),
    "fp8": Precision(torch.bfloat16, torch.bfloat16, weights="fp8", whole_head=True),
}

# Only products round to bf16; the cache is in FP16, which is finer, as for int8.
_BFLOAT_PRODUCTS = Precision(torch.float32, cache=torch.float16, weights="bfloat16")

GPU_PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
"""The precisions of the CUDA kernels."""

COMPUTED_IN = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
"""The precision by the dtype of activations.  int8 models compute in FP32, fp8 models in bf16."""

MORE_PRECISE = {"int8": "fp32", "fp8": "fp32", "bf16": "fp32", "fp16": "fp32", "fp32": "fp64"}
"""The precision in which a request is computed again whose scores were not finite."""

ADVANTAGE = 1.25
"""bf16 is chosen only if it is so much faster than fp32.

Noise must not decide, and where little is gained, fp32 is more exact.
"""

# The smallest product of a GPT-2-small block, at the rows of a half-filled decode step.
_ROWS, _IN, _OUT = 32, 768, 768
# On a busy host threads lose whole time slices: single products can be fair to one dtype only.
_TURNS, _PER_TURN = 8, 16
# A disturbance may last longer than all turns: they are repeated after a pause.
_ROUNDS, _ROUNDS_APART_S = 5, 0.05


def precision_of(dtype: str, device: str) -> Precision:
    """Return the precision for `dtype`, a name of PRECISIONS, on "cpu" or a GPU.

    bf16 differs on a CPU that has instructions for it.
    """
    if dtype == "bf16" and serves_bfloat16(device):
        return _BFLOAT_PRODUCTS
    return PRECISIONS[dtype]


@dataclass(frozen=True, slots=True)
class Probe:
    """The shortest times of a product in each precision."""

    fp32_s: float
    bf16_s: float


def computes_bfloat16() -> bool:
    """Whether this processor has instructions for products in bfloat16."""
    return serves_bfloat16("cpu") or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def fastest_dtype(found: Probe) -> str:
    """ "bf16" where its products are clearly faster than fp32's on this processor, else "fp32"."""
    return "bf16" if found.bf16_s * ADVANTAGE <= found.fp32_s else "fp32"


def probe(product: Callable[[str], float] | None = None) -> Probe:
    """Time products in both precisions.

    product: gives the seconds of one product in fp32 or bf16; by default it runs and times one.
    The two take turns of several products, so that busy and calm moments meet both.
    """
    if product is None:
        with _one_thread():
            return probe(_PackedProduct())
    fp32_s = bf16_s = math.inf
    for number in range(_ROUNDS):
        time.sleep(_ROUNDS_APART_S if number else 0)
        for _ in range(_TURNS):
            fp32_s = min(fp32_s, *(product("fp32") for _ in range(_PER_TURN)))
            bf16_s = min(bf16_s, *(product("bf16") for _ in range(_PER_TURN)))
    return Probe(fp32_s, bf16_s)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Time with one thread.

    Two threads are fast only while each has its own core, which one precision may meet and the
    other not. One thread is fast whenever it runs.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _PackedProduct:
    """Times one packed product; weights are packed and kernels built before."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(_OUT, _IN, generator=generator)
        rows = torch.randn(_ROWS, _IN, generator=generator)
        self._operands = {}
        for name in ("fp32", "bf16"):
            precision = precision_of(name, "cpu")
            packed = precision.pack(weight.to(precision.dtype), None)
            self._operands[name] = rows.to(precision.dtype), packed
            self(name)

    def __call__(self, name: str) -> float:
        rows, weight = self._operands[name]
        started = time.perf_counter()
        linear(rows, weight)
        return time.perf_counter() - started
