"""From the settings of a GPU worker to those of its compute processes."""

from pathlib import Path

from nightjar.compute_config import CPU_CACHE_BYTES, ComputeConfig, usable_cores
from nightjar.pipeline.settings import Settings, SettingsError


def compute_config(
    settings: Settings, model: Path, stamp: str = "", models: int = 1, unverified: str = ""
) -> ComputeConfig:
    """Return what the settings say about the processes that compute a model.

    Args:
        settings: Of the GPU worker; memory and threads are those of all its models together.
        model: Directory of the model.
        stamp: Stamp of the model's files.
        models: How many models the worker serves. Each gets an even part.
        unverified: Fingerprint of the model, if it is to be verified.

    Raises:
        SettingsError: Several models on a GPU, without the bytes of their caches.
    """
    threads = settings.compute_threads
    if models > 1:  # else each would take all cores, and threads that wait for each other spin
        threads = max(1, (threads or usable_cores()) // models)
    return ComputeConfig(
        model=model,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        device=settings.device,
        kv_cache_bytes=_cache_bytes(settings, models),
        gpu_memory_share=settings.gpu_memory_share,
        host_cache_bytes=settings.host_cache_bytes // models,
        prompt_vector_bytes=settings.prompt_vector_bytes // models,
        threads=threads,
        stalled_after_s=settings.compute_stalled_after_s,
        engine=settings.engine,
        fake_step_s=settings.fake_step_s,
        shards=settings.shard_count,
        devices=settings.device_list,
        rank_late_after_s=settings.rank_late_after_s,
        window_steps=settings.window_steps,
        cuda_graphs=settings.cuda_graphs,
        cuda_prefetch=settings.cuda_prefetch,
        cuda_small_products=settings.cuda_small_products,
        cuda_fused_heads=settings.cuda_fused_heads,
        stamp=stamp,
        shared_weights=settings.shared_weights,
        unverified=unverified,
    )


def _cache_bytes(settings: Settings, models: int) -> int | None:
    """Return the bytes for keys and values of one model; None leaves them to the engine."""
    if models == 1:
        return settings.kv_cache_bytes
    is_gpu = settings.device != "cpu" or bool(settings.device_list)
    if settings.kv_cache_bytes is None and is_gpu and settings.engine != "fake":
        # A share of what is free depends on which model was loaded first, and changes when one
        # compute process is started again.
        raise SettingsError(
            "NIGHTJAR_KV_CACHE_BYTES is not set: several models on one GPU divide it evenly; set "
            "it to what the GPU has left beside the weights of all of them"
        )
    return max(1, (settings.kv_cache_bytes or CPU_CACHE_BYTES) // models)
