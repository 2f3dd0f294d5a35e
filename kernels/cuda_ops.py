"""The GPU's side of the op list: what the modules of `kernels.ops` call where tensors are on a GPU.

`launch.serves` says where that is.  Names mean what they mean in `kernels.ops`; what differs in
arguments (attention takes block tables on the device, `token_nll` takes scores) is brought together
by the module that chooses.  Those of a step's end are on the list as they are here: a step's state
never leaves the device, and no other backend has them.
"""

from nightjar.kernels.cuda.activation import activation
from nightjar.kernels.cuda.argmax import argmax
from nightjar.kernels.cuda.decode_attention import (
    decode_attention,
    decode_heads,
    finishes_heads,
)
from nightjar.kernels.cuda.embedding import embed
from nightjar.kernels.cuda.kv_transfer import kv_pack, kv_unpack
from nightjar.kernels.cuda.linear import (
    linear,
    linear_onto,
    normed_linear,
    serves_norm,
    serves_rows,
    serves_weight,
)
from nightjar.kernels.cuda.merge import merge_attention
from nightjar.kernels.cuda.norm import layer_norm, rms_norm
from nightjar.kernels.cuda.penalties import penalize
from nightjar.kernels.cuda.philox import uniform
from nightjar.kernels.cuda.prompt_attention import branch_attention, prefill_attention
from nightjar.kernels.cuda.qkv_post import qkv_post
from nightjar.kernels.cuda.sample import sample
from nightjar.kernels.cuda.step_update import (
    Column,
    Reason,
    StepState,
    StopTables,
    TokenTexts,
    step_update,
)
from nightjar.kernels.cuda.token_nll import token_nll
from nightjar.kernels.heads import CacheWrite, HeadNorms, Rotation

__all__ = [
    "CacheWrite",
    "Column",
    "HeadNorms",
    "Reason",
    "Rotation",
    "StepState",
    "StopTables",
    "TokenTexts",
    "activation",
    "argmax",
    "branch_attention",
    "decode_attention",
    "decode_heads",
    "embed",
    "finishes_heads",
    "kv_pack",
    "kv_unpack",
    "layer_norm",
    "linear",
    "linear_onto",
    "merge_attention",
    "normed_linear",
    "penalize",
    "prefill_attention",
    "qkv_post",
    "rms_norm",
    "sample",
    "serves_norm",
    "serves_rows",
    "serves_weight",
    "step_update",
    "token_nll",
    "uniform",
]
