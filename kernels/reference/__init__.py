"""The op list in torch: every device and dtype, and the oracle of the other backends."""

from nightjar.kernels.reference import branch, decode, log_prob, norm, paged_cache, prefill

__all__ = ["branch", "decode", "log_prob", "norm", "paged_cache", "prefill"]
