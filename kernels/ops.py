"""The op list: every name the models and the engine may call, and the backend that answers.

A second backend implements the same names with the same shapes and is chosen here, by the device
of the arguments; nothing outside this folder knows which one ran.
"""

from nightjar.kernels.reference.activation import activation
from nightjar.kernels.reference.branch import branch_attention
from nightjar.kernels.reference.decode import decode_attention
from nightjar.kernels.reference.embedding import embed
from nightjar.kernels.reference.linear import (
    FloatWeight,
    Int8Weight,
    LinearWeight,
    WeightPrecision,
    linear,
    pack_linear,
)
from nightjar.kernels.reference.log_prob import token_nll
from nightjar.kernels.reference.logits import (
    bias_tokens,
    block_tokens,
    penalize_tokens,
    top_log_probs,
)
from nightjar.kernels.reference.merge import merge_attention
from nightjar.kernels.reference.norm import layer_norm, rms_norm
from nightjar.kernels.reference.paged_cache import kv_write
from nightjar.kernels.reference.philox import uniform
from nightjar.kernels.reference.prefill import prefill_attention
from nightjar.kernels.reference.rotary import rotary
from nightjar.kernels.reference.sampling import argmax, sample
from nightjar.kernels.reference.widened import widened

__all__ = [
    "FloatWeight",
    "Int8Weight",
    "LinearWeight",
    "WeightPrecision",
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
    "penalize_tokens",
    "prefill_attention",
    "rms_norm",
    "rotary",
    "sample",
    "token_nll",
    "top_log_probs",
    "uniform",
    "widened",
]
