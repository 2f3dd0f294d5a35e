"""What the CUDA kernels do not compute."""

from __future__ import annotations

from nightjar.checkpoints import CheckpointError, ModelConfig
from nightjar.gpu_worker.models.precision import GPU_PRECISIONS
from nightjar.kernels.device import HEAD_SIZES, MAX_VOCAB, fp8_missing


def check_gpu(config: ModelConfig, dtype: str, device: str) -> None:
    """Refuse a model that the CUDA kernels do not compute, before anything is read."""
    if dtype not in GPU_PRECISIONS:
        known = ", ".join(GPU_PRECISIONS)
        raise ValueError(f"dtype {dtype!r} is not computed on {device}: use one of {known}")
    if dtype == "fp8" and (missing := fp8_missing(device)) is not None:
        raise ValueError(f"dtype 'fp8' is not computed on {device}: {missing}; use bf16 or fp16")
    if config.head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        raise CheckpointError(
            f"the model's heads have {config.head_size} channels, and on {device} there are "
            f"kernels for {sizes}: compute it on the CPU"
        )
    if config.vocab_size > MAX_VOCAB:
        raise CheckpointError(
            f"the model has {config.vocab_size} tokens, and on {device} there are kernels for "
            f"{MAX_VOCAB} at most: compute it on the CPU"
        )
