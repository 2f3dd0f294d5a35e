"""The op list in torch: every device and dtype, and the oracle of the other backends."""

from nightjar.kernels.reference import (
    activation,
    branch,
    decode,
    embedding,
    kv_transfer,
    log_prob,
    merge,
    norm,
    paged_cache,
    philox,
    prefill,
    rotary,
    sampling,
)

__all__ = [
    "activation",
    "branch",
    "decode",
    "embedding",
    "kv_transfer",
    "log_prob",
    "merge",
    "norm",
    "paged_cache",
    "philox",
    "prefill",
    "rotary",
    "sampling",
]
