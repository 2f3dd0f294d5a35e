"""Settings of a GPU worker's engines; a part of `Settings`."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings

from nightjar.compute_config import ComputeConfig, Dtype, EngineKind, KVCacheDtype, Verify
from nightjar.pipeline.settings.read_by import API, COMMANDS, GPU_WORKER, PLANNER, read_by

WORKER = read_by(GPU_WORKER)
SWITCH = read_by(GPU_WORKER, page="guides/gpu.md")
SHARDED = read_by(GPU_WORKER, page="explanations/shards.md")
SPLIT = read_by(GPU_WORKER, PLANNER, COMMANDS, page="explanations/shards.md")


class EngineSettings(BaseSettings):
    """The engine."""

    engine: Annotated[EngineKind, read_by(GPU_WORKER, PLANNER, API)] = Field(
        ComputeConfig.engine,
        description="`fake`: answers are made up without a model, to test and time what is around "
        "it",
    )
    fake_step_s: Annotated[float, WORKER] = Field(
        ComputeConfig.fake_step_s, ge=0, description="seconds that a step of the fake engine takes"
    )
    dtype: Annotated[Dtype, read_by(GPU_WORKER, PLANNER, API)] = Field(
        ComputeConfig.dtype,
        description="precision of weights and products; `auto`: bf16 on a GPU, and on a CPU the "
        "fastest that it computes in; `int8`: on a CPU; `fp8`: on a GPU",
    )
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        read_by(GPU_WORKER, PLANNER, page="explanations/engine.md#keys-and-values-in-fp8"),
    ] = Field(
        ComputeConfig.kv_cache_dtype,
        description="`fp8`: keys and values take half of the memory of 16 bits, and answers change "
        "a little; `auto`: the dtype of the precision",
    )
    verify: Annotated[Verify, read_by(GPU_WORKER, page="guides/converting.md")] = Field(
        "auto",
        description="`auto`: a model that was never verified is verified quickly at its first "
        "start, and a damaged one does not serve; `off`: it serves as it is",
    )
    device: Annotated[str, WORKER] = Field(
        ComputeConfig.device, description="`cpu`, `cuda` or `cuda:NUMBER`"
    )
    shards: Annotated[int | None, SPLIT] = Field(
        None, ge=1, description="processes that the model is split over; by default one per device"
    )
    devices: Annotated[str, SPLIT] = Field(
        "",
        validate_default=True,
        description="CUDA devices of this worker, one per shard, such as `0,1`: positions in "
        "`CUDA_VISIBLE_DEVICES` if that is set, else the numbers of nvidia-smi. Not together with "
        "`NIGHTJAR_DEVICE`",
    )
    shared_weights: Annotated[
        Path | None, read_by(GPU_WORKER, page="reference/models.md#shared-weights")
    ] = Field(
        None,
        description="folder of packed weights on this machine, which all workers of a model map: "
        "one copy in memory, and a fast start; on a CPU, without shards",
    )
    compute_threads: Annotated[int | None, WORKER] = Field(
        ComputeConfig.threads,
        ge=1,
        description="CPU threads of a worker's engines, all shards and models together; by "
        "default all cores",
    )
    kv_cache_bytes: Annotated[int | None, WORKER] = Field(
        ComputeConfig.kv_cache_bytes,
        ge=1,
        description="memory for keys and values, per shard, all models of a worker together; by "
        "default 1 GiB on a CPU, and `NIGHTJAR_GPU_MEMORY_SHARE` on a GPU",
    )
    gpu_memory_share: Annotated[float, WORKER] = Field(
        ComputeConfig.gpu_memory_share,
        gt=0,
        lt=1,
        description="share of the memory that the model and recorded steps leave free on a GPU, "
        "for its cache",
    )
    host_cache_bytes: Annotated[int, WORKER] = Field(
        ComputeConfig.host_cache_bytes,
        ge=0,
        description="host memory for prefixes that the cache has no room for, all models of a "
        "worker together; 0 for none",
    )
    prompt_vector_bytes: Annotated[int, WORKER] = Field(
        ComputeConfig.prompt_vector_bytes,
        ge=1,
        description="memory of compute processes for prompt vectors and LoRA adapters, all models "
        "of a worker together; the least recently used leave, requests in flight keep theirs",
    )
    window_steps: Annotated[int, SWITCH] = Field(
        ComputeConfig.window_steps,
        ge=1,
        le=64,
        description="decode steps that a GPU takes before the host reads their tokens; 1 switches "
        "windows off",
    )
    cuda_graphs: Annotated[bool, SWITCH] = Field(
        ComputeConfig.cuda_graphs, description="launch steps on a GPU as CUDA graphs"
    )
    cuda_prefetch: Annotated[bool, SWITCH] = Field(
        ComputeConfig.cuda_prefetch,
        description="prefetch weights and caches into a GPU's second-level cache",
    )
    cuda_small_products: Annotated[bool, SWITCH] = Field(
        ComputeConfig.cuda_small_products,
        description="use Nightjar's kernel for products of up to 8 rows; else cuBLAS",
    )
    cuda_fused_heads: Annotated[bool, SWITCH] = Field(
        ComputeConfig.cuda_fused_heads,
        description="let decode attention on a GPU normalise, rotate and cache its heads",
    )
    compute_stalled_after_s: Annotated[float, WORKER] = Field(
        ComputeConfig.stalled_after_s,
        gt=0,
        description="a compute process without a step for so long is ended",
    )
    rank_late_after_s: Annotated[float, SHARDED] = Field(
        ComputeConfig.rank_late_after_s,
        gt=0,
        description="a shard that keeps the others waiting for so long is ended with them",
    )

    @field_validator("device")
    @classmethod
    def _names_a_device(cls, device: str) -> str:
        if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
            raise ValueError(f"{device!r}: give cpu, cuda or cuda:<number>")
        return device

    @field_validator("devices")
    @classmethod
    def _one_device_a_shard(cls, devices: str, info: ValidationInfo) -> str:
        named = devices.split(",") if devices else []
        if not all(re.fullmatch("[0-9]+", number) for number in named):
            raise ValueError(f"{devices!r}: give numbers with commas between them, such as 0,1")
        if len(set(named)) < len(named):
            raise ValueError(f"{devices} names a device twice; give each shard its own")
        shards = info.data.get("shards")
        if named and shards is not None and shards != len(named):
            raise ValueError(f"{devices} names {len(named)} devices for {shards} shards")
        device = info.data.get("device", "cpu")
        if named and device != "cpu":
            raise ValueError(
                f"{devices} beside NIGHTJAR_DEVICE {device}: give one of them; --devices 1 is one "
                "GPU as well"
            )
        if not named and (shards or 1) > 1 and device != "cpu":
            raise ValueError(f"none for {shards} shards on a GPU; name one for each")
        return devices

    @property
    def device_list(self) -> tuple[str, ...]:
        """The CUDA devices by rank; empty for the CPU."""
        return tuple(self.devices.split(",")) if self.devices else ()

    @property
    def shard_count(self) -> int:
        """How many processes compute the model."""
        return self.shards or len(self.device_list) or 1
