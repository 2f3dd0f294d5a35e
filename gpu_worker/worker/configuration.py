"""From the settings of a GPU worker to those of its compute processes."""

from pathlib import Path

from nightjar.compute_config import ComputeConfig
from nightjar.pipeline.settings import Settings


def compute_config(settings: Settings, model: Path, stamp: str = "") -> ComputeConfig:
    """Return what the settings say about the processes that compute a model.

    stamp: Stamp of the model's files.
    """
    return ComputeConfig(
        model=model,
        dtype=settings.dtype,
        device=settings.device,
        kv_cache_bytes=settings.kv_cache_bytes,
        gpu_memory_share=settings.gpu_memory_share,
        host_cache_bytes=settings.host_cache_bytes,
        threads=settings.compute_threads,
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
    )
