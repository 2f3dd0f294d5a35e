"""The ops in torch: for every device and dtype; the other backends are tested against them."""

# ruff: noqa: F401 (the modules are the names of the package)
from nightjar.kernels.reference import (
    activation,
    attention,
    branch,
    decode,
    embedding,
    fp8_linear,
    fp8_rows,
    kv_transfer,
    log_prob,
    logits,
    low_rank,
    merge,
    norm,
    packing,
    paged_cache,
    philox,
    prefill,
    rotary,
    sampling,
    widened,
)
