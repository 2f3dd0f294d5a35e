"""The op list: every name the models and the engine may call.

Where an op has several backends (`reference/` in torch, `native/` in C++, `cuda/` on a GPU), the
module of its name here chooses one by the device and dtype of the arguments; nothing outside this
folder knows which one ran.  `penalize` and `step_update` end a step whose state never leaves the
device; they are there where `on_gpu` says so.
"""

from nightjar.kernels.attention import (
    attend,
    branch_attention,
    decode_attention,
    merge_attention,
    prefill_attention,
    qkv_post,
)
from nightjar.kernels.cuda.launch import serves as on_gpu
from nightjar.kernels.cuda_ops import (
    Column,
    Reason,
    StepState,
    StopTables,
    TokenTexts,
    penalize,
    step_update,
)
from nightjar.kernels.embedding import TokenTable, embed, tied_table
from nightjar.kernels.heads import CacheWrite, HeadNorms, Rotation
from nightjar.kernels.kv_transfer import kv_pack, kv_unpack
from nightjar.kernels.layers import Layers, LayerWeights, chained, run_layers
from nightjar.kernels.linear import (
    GatedWeight,
    LinearWeight,
    WeightPrecision,
    activation,
    feed_forward,
    feed_forward_onto,
    gated_linear,
    linear,
    linear_onto,
    normed_linear,
    pack_gated,
    pack_linear,
    serves_bfloat16,
)
from nightjar.kernels.log_prob import token_log_sums, token_nll
from nightjar.kernels.norm import Norm, layer_norm, normalize, rms_norm
from nightjar.kernels.reference.logits import (
    bias_tokens,
    block_tokens,
    penalize_tokens,
    top_log_probs,
)
from nightjar.kernels.reference.paged_cache import kv_write
from nightjar.kernels.reference.rotary import rotary
from nightjar.kernels.reference.widened import widened
from nightjar.kernels.sampling import argmax, sample, uniform
from nightjar.kernels.upload import upload

__all__ = [
    "CacheWrite",
    "Column",
    "GatedWeight",
    "HeadNorms",
    "LayerWeights",
    "Layers",
    "LinearWeight",
    "Norm",
    "Reason",
    "Rotation",
    "StepState",
    "StopTables",
    "TokenTable",
    "TokenTexts",
    "WeightPrecision",
    "activation",
    "argmax",
    "attend",
    "bias_tokens",
    "block_tokens",
    "branch_attention",
    "chained",
    "decode_attention",
    "embed",
    "feed_forward",
    "feed_forward_onto",
    "gated_linear",
    "kv_pack",
    "kv_unpack",
    "kv_write",
    "layer_norm",
    "linear",
    "linear_onto",
    "merge_attention",
    "normalize",
    "normed_linear",
    "on_gpu",
    "pack_gated",
    "pack_linear",
    "penalize",
    "penalize_tokens",
    "prefill_attention",
    "qkv_post",
    "rms_norm",
    "rotary",
    "run_layers",
    "sample",
    "serves_bfloat16",
    "step_update",
    "tied_table",
    "token_log_sums",
    "token_nll",
    "top_log_probs",
    "uniform",
    "upload",
    "widened",
]
