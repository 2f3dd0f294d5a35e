"""How the processes of one model are started: one record, from the settings to the engine.

`pipeline/settings/engine.py` takes its defaults from here and checks what a user gives. The launcher
writes the record into each process's start-up message (`gpu_worker/shards/startup.py`). The compute
process builds its engine from it.

This module imports nothing of ours and no third-party package, so that every room may import it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Dtype = Literal["auto", "fp64", "fp32", "bf16", "fp16", "int8", "fp8"]
KVCacheDtype = Literal["auto", "fp8"]
"""Of keys and values; "auto": that of the model's precision."""
EngineKind = Literal["model", "fake"]
Verify = Literal["auto", "off"]
"""Whether a model that was never verified is verified quickly at its first start."""

CPU_CACHE_BYTES = 1 << 30
"""Keys and values of one model on a CPU, unless something else is asked for."""

CUDA_SWITCHES = ("cuda_graphs", "cuda_prefetch", "cuda_small_products", "cuda_fused_heads")
"""Fields of ComputeConfig that switch a part of the CUDA path off."""


# Without slots, so that the defaults can be read from the class.
@dataclass(frozen=True)
class ComputeConfig:
    """One model and how it is computed.

    kv_cache_dtype: "fp8" keeps keys and values in FP8.
    kv_cache_bytes: Memory for keys and values, of each rank. None means `gpu_memory_share` of what
        the model leaves free on a GPU, and the engine's default on a CPU.
    host_cache_bytes: Host memory for keys and values that the cache has no room for; 0 for none.
    prompt_vector_bytes: Memory of the compute process for prompt vectors and LoRA adapters.
    threads: CPU threads of all ranks together; None means torch's default.
    stalled_after_s: A compute process without a step for so long is ended.
    engine: "fake" makes answers up; its steps take `fake_step_s`.
    shards: Ranks that the model is split among.
    devices: The CUDA device of each rank, counted among those that the worker sees. Without any,
        all ranks compute on `device`.
    rank_late_after_s: A rank that keeps another waiting or is silent for so long is lost.
    window_steps: Decode steps that a GPU takes before the host reads them.
    stamp: Stamp of the model's files. A process that finds other files does not start.
    shared_weights: Folder of packed weights that all processes of a machine map; None for none.
    unverified: Fingerprint of a model that was never verified. It is verified after loading.
    """

    model: Path
    dtype: Dtype = "auto"
    device: str = "cpu"
    kv_cache_dtype: KVCacheDtype = "auto"
    kv_cache_bytes: int | None = None
    gpu_memory_share: float = 0.85
    host_cache_bytes: int = 0
    prompt_vector_bytes: int = 256 << 20
    threads: int | None = None
    stalled_after_s: float = 120.0
    load_timeout_s: float = 1800.0
    engine: EngineKind = "model"
    fake_step_s: float = 0.0
    shards: int = 1
    devices: tuple[str, ...] = ()
    rank_late_after_s: float = 8.0
    window_steps: int = 8
    cuda_graphs: bool = True
    cuda_prefetch: bool = True
    cuda_small_products: bool = True
    cuda_fused_heads: bool = True
    stamp: str = ""
    shared_weights: Path | None = None
    unverified: str = ""

    @property
    def ranks(self) -> int:
        """How many processes compute the model; a fake engine needs one."""
        return 1 if self.engine == "fake" else self.shards

    @property
    def threads_per_rank(self) -> int | None:
        """Each rank's share of the threads; None means torch's default."""
        if self.ranks == 1:
            return self.threads
        return max(1, (self.threads or usable_cores()) // self.ranks)

    @property
    def rank_device(self) -> str:
        """The device as a rank names it: with `devices`, each rank sees only its own."""
        return "cuda" if self.devices else self.device

    @property
    def switched_off(self) -> list[str]:
        """The fields of CUDA_SWITCHES that are off."""
        return [name for name in CUDA_SWITCHES if not getattr(self, name)]


_FP8_CACHE = "+fp8-kv"


def precision_with_cache(precision: str, cache: KVCacheDtype) -> str:
    """Return how results name a precision: with the dtype of keys and values, if it is not its own.

    An answer from a cache in FP8 is then never taken for one from a whole cache.
    """
    return precision + _FP8_CACHE if cache == "fp8" else precision


def without_cache(precision: str) -> tuple[str, KVCacheDtype]:
    """Undo `precision_with_cache`."""
    plain = precision.removesuffix(_FP8_CACHE)
    return plain, "auto" if plain == precision else "fp8"


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # in a container these may be fewer than the machine's
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
