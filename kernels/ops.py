"""The op list: every op with its implementations.

Torch's implementation (`reference/`) takes every device and dtype; three ops have none. The other
two are tested against it: C++ (`native/`), the fast CPU path, and CUDA (`cuda/`). Each op stands
here once; docs/guides/adding-an-op.md shows how one is added. Matrix products are methods of the
packed weights, whose backend is chosen when they are packed.
"""

import torch
from torch import Tensor

from nightjar.kernels import cuda, native, reference
from nightjar.kernels.cuda.launch import serves
from nightjar.kernels.dispatch import Op
from nightjar.kernels.operands import NARROW, LinearWeight, Parts, WeightPrecision, Wide

on_gpu = serves

# Attention over the paged cache.
attend = Op(reference.attention.attend).native(native.attention.attend).cuda(cuda.attention.attend)
qkv_post = Op(reference.attention.qkv_post).cuda(cuda.attention.qkv_post)
prefill_attention = (
    Op(reference.prefill.prefill_attention)
    .native(native.attention.prefill_attention)
    .cuda(cuda.prompt_attention.prefill_attention)
)
decode_attention = (
    Op(reference.decode.decode_attention)
    .native(native.attention.decode_attention)
    .cuda(cuda.attention.decode_attention)
)
branch_attention = (
    Op(reference.branch.branch_attention)
    .native(native.attention.branch_attention)
    .cuda(cuda.prompt_attention.branch_attention)
)
merge_attention = Op(reference.merge.merge_attention).cuda(cuda.merge.merge_attention)
rotary = reference.rotary.rotary
kv_write = reference.paged_cache.kv_write
kv_pack = Op(reference.kv_transfer.kv_pack).cuda(cuda.kv_transfer.kv_pack)
kv_unpack = Op(reference.kv_transfer.kv_unpack).cuda(cuda.kv_transfer.kv_unpack)

# The residual stream.
layer_norm = Op(reference.norm.layer_norm).native(native.norm.layer_norm).cuda(cuda.norm.layer_norm)
rms_norm = Op(reference.norm.rms_norm).native(native.norm.rms_norm).cuda(cuda.norm.rms_norm)
activation = (
    Op(reference.activation.activation)
    .native(native.activation.activation)
    .cuda(cuda.activation.activation)
)
widened = reference.widened.widened
add_low_rank = reference.low_rank.add_low_rank
run_layers = native.layers.run_layers

# Scores and tokens.
target_nll = (
    Op(reference.log_prob.target_nll)
    .native(native.log_prob.target_nll)
    .cuda(cuda.token_nll.token_nll)
)
top_log_probs = reference.logits.top_log_probs
block_tokens = reference.logits.block_tokens
bias_tokens = reference.logits.bias_tokens
penalize_tokens = reference.logits.penalize_tokens
argmax = Op(reference.sampling.argmax).native(native.argmax.argmax).cuda(cuda.argmax.argmax)
sample = Op(reference.sampling.sample).cuda(cuda.sample.sample)
uniform = Op(reference.philox.uniform).cuda(cuda.philox.uniform)

# The prompts of a step at fixed addresses; only where `on_gpu` is true.
prompt_tiles = cuda.prompt_attention.prompt_tiles
most_prompt_tiles = cuda.paged_prefill.most_tiles
decode_part_bytes = cuda.decode_attention.part_bytes

# The end of a step whose state never leaves the device; only where `on_gpu` is true.
penalize = cuda.penalties.penalize
step_update = cuda.step_update.step_update


def pack_linear(
    weight: Tensor,
    bias: Tensor | None,
    precision: WeightPrecision = "float",
    wide: Wide = NARROW,
) -> LinearWeight:
    """Pack weight [out, in] for the device it is on; the original may be dropped afterwards.

    wide: what stays in FP32 where the weight is in FP16.

    Raises:
        ValueError: There are no products of that precision for the device or the processor.
    """
    pack = cuda.packing.pack_linear if serves(weight) else native.packing.pack_linear
    return pack(weight, bias, precision, wide)


def pack_gated(
    gate: Parts, up: Parts, precision: WeightPrecision = "float", wide: Wide = NARROW
) -> LinearWeight:
    """Pack two weights of one shape as a gated weight; raises as pack_linear does."""
    pack = cuda.packing.pack_gated if serves(gate[0]) else native.packing.pack_gated
    return pack(gate, up, precision, wide)


def packs_copies(dtype: torch.dtype, precision: WeightPrecision) -> bool:
    """Whether what is packed on the CPU, in that precision or as it is, has memory of its own."""
    weight = torch.empty(0, dtype=dtype)
    return not serves(weight) and native.packing.copies(weight, precision)


def serves_bfloat16(device: str) -> bool:
    """Whether there are products of that precision for FP32 rows on the device.

    Only some CPUs have them.  Where tests run the CUDA kernels on the CPU there are none.
    """
    return device == "cpu" and not serves(torch.empty(0)) and native.float_linear.serves_bfloat16()
