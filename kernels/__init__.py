"""The arithmetic of a decoder: one list of ops, and the layouts that describe a step to them.

`nightjar.kernels.ops` is the list; `reference/` is its torch backend, which serves the CPU and is
the oracle of every other backend.
"""

from nightjar.kernels.layout import BranchLayout, PagedLayout, RaggedLayout
from nightjar.kernels.ops import (
    FloatWeight,
    Int8Weight,
    LinearWeight,
    WeightPrecision,
    activation,
    argmax,
    branch_attention,
    decode_attention,
    embed,
    kv_write,
    layer_norm,
    linear,
    merge_attention,
    pack_linear,
    prefill_attention,
    sample,
    token_nll,
    uniform,
)

__all__ = [
    "BranchLayout",
    "FloatWeight",
    "Int8Weight",
    "LinearWeight",
    "PagedLayout",
    "RaggedLayout",
    "WeightPrecision",
    "activation",
    "argmax",
    "branch_attention",
    "decode_attention",
    "embed",
    "kv_write",
    "layer_norm",
    "linear",
    "merge_attention",
    "pack_linear",
    "prefill_attention",
    "sample",
    "token_nll",
    "uniform",
]
