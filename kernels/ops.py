"""The op list: every name the models and the engine may call.

Where an op has several backends (`reference/` in torch, `native/` in C++), the module of its name
here chooses one by the device and dtype of the arguments; nothing outside this folder knows which
one ran.
"""

from nightjar.kernels.attention import (
    branch_attention,
    decode_attention,
    kv_write,
    prefill_attention,
)
from nightjar.kernels.linear import (
    GatedWeight,
    LinearWeight,
    WeightPrecision,
    gated_linear,
    linear,
    pack_gated,
    pack_linear,
)
from nightjar.kernels.log_prob import token_log_sums, token_nll
from nightjar.kernels.norm import layer_norm, rms_norm
from nightjar.kernels.reference.activation import activation
from nightjar.kernels.reference.embedding import embed
from nightjar.kernels.reference.logits import (
    bias_tokens,
    block_tokens,
    penalize_tokens,
    top_log_probs,
)
from nightjar.kernels.reference.merge import merge_attention
from nightjar.kernels.reference.philox import uniform
from nightjar.kernels.reference.rotary import rotary
from nightjar.kernels.reference.sampling import argmax, sample
from nightjar.kernels.reference.widened import widened

__all__ = [
    "GatedWeight",
    "LinearWeight",
    "WeightPrecision",
    "activation",
    "argmax",
    "bias_tokens",
    "block_tokens",
    "branch_attention",
    "decode_attention",
    "embed",
    "gated_linear",
    "kv_write",
    "layer_norm",
    "linear",
    "merge_attention",
    "pack_gated",
    "pack_linear",
    "penalize_tokens",
    "prefill_attention",
    "rms_norm",
    "rotary",
    "sample",
    "token_log_sums",
    "token_nll",
    "top_log_probs",
    "uniform",
    "widened",
]
