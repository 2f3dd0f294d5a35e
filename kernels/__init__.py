"""The arithmetic of a decoder: one list of ops, and the layouts that describe a step to them.

`nightjar.kernels.ops` is the list; `reference/` is its torch backend, which serves the CPU and is
the oracle of every other backend.
"""

from nightjar.kernels.layout import (
    Branch,
    BranchLayout,
    Chunk,
    ChunkLayout,
    PagedLayout,
    padded_length,
)
from nightjar.kernels.ops import (
    LinearWeight,
    activation,
    argmax,
    bias_tokens,
    block_tokens,
    branch_attention,
    decode_attention,
    embed,
    kv_write,
    layer_norm,
    linear,
    merge_attention,
    pack_linear,
    penalize_tokens,
    prefill_attention,
    rms_norm,
    rotary,
    sample,
    token_nll,
    top_log_probs,
    uniform,
)

__all__ = [
    "Branch",
    "BranchLayout",
    "Chunk",
    "ChunkLayout",
    "LinearWeight",
    "PagedLayout",
    "activation",
    "argmax",
    "bias_tokens",
    "block_tokens",
    "branch_attention",
    "decode_attention",
    "embed",
    "kv_write",
    "layer_norm",
    "linear",
    "merge_attention",
    "pack_linear",
    "padded_length",
    "penalize_tokens",
    "prefill_attention",
    "rms_norm",
    "rotary",
    "sample",
    "token_nll",
    "top_log_probs",
    "uniform",
]
