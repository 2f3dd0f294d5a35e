"""The op list in CUDA: what `kernels.ops` will call where tensors are on a GPU.

Names that are also in `kernels.ops` take the same arguments and mean the same; the others exist
only here, because on a GPU several ops are one launch or a step's state never leaves the device.
"""

from nightjar.kernels.cuda.activation import activation
from nightjar.kernels.cuda.argmax import argmax
from nightjar.kernels.cuda.decode_attention import decode_attention
from nightjar.kernels.cuda.embedding import embed
from nightjar.kernels.cuda.kv_transfer import kv_pack, kv_unpack
from nightjar.kernels.cuda.merge import merge_attention
from nightjar.kernels.cuda.norm import layer_norm, rms_norm
from nightjar.kernels.cuda.penalties import penalize
from nightjar.kernels.cuda.philox import uniform
from nightjar.kernels.cuda.qkv_post import CacheWrite, HeadNorms, Rotation, qkv_post
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
    "decode_attention",
    "embed",
    "kv_pack",
    "kv_unpack",
    "layer_norm",
    "merge_attention",
    "penalize",
    "qkv_post",
    "rms_norm",
    "sample",
    "step_update",
    "token_nll",
    "uniform",
]
