"""Settings of every Nightjar process, read from `NIGHTJAR_*` environment variables."""

import logging
import os
import re
from typing import Any, Self

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from nightjar.compute_config import ComputeConfig, Dtype, EngineKind
from nightjar.pipeline.api_settings import ApiSettings
from nightjar.pipeline.model_settings import ModelSettings
from nightjar.pipeline.monitoring_settings import MonitoringSettings
from nightjar.pipeline.schedule_settings import ScheduleSettings
from nightjar.pipeline.variables import unknown_variables

logger = logging.getLogger(__name__)

_BROKERS = ("redis", "rediss", "redis+socket", "sentinel")


class SettingsError(Exception):
    """A setting is missing or cannot be used; the message names the variable."""


class Settings(ApiSettings, ModelSettings, MonitoringSettings, ScheduleSettings):
    """One frozen configuration for the planner, the workers, the API and the command line.

    Every field is the environment variable `NIGHTJAR_<FIELD>`, for example
    `NIGHTJAR_DATABASE_URL`. Units stand in the names: `_s` seconds, `_bytes` bytes.
    """

    model_config = SettingsConfigDict(env_prefix="NIGHTJAR_", frozen=True, extra="forbid")

    database_url: SecretStr = SecretStr("sqlite:///nightjar.db")
    broker_url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    message_key: SecretStr | None = Field(
        None,
        min_length=16,
        description="secret that signs messages, the same for all processes; unsigned messages are "
        "dropped. Without one, anyone who reaches the broker may send work",
    )

    dtype: Dtype = ComputeConfig.dtype
    device: str = Field(ComputeConfig.device, description="cpu, cuda or cuda:<number>")
    kv_cache_bytes: int | None = Field(
        ComputeConfig.kv_cache_bytes,
        ge=1,
        description="memory for keys and values, of each shard; by default 1 GiB on a CPU, and "
        "gpu_memory_share on a GPU",
    )
    gpu_memory_share: float = Field(
        ComputeConfig.gpu_memory_share,
        gt=0,
        lt=1,
        description="share of the memory that the model leaves free on a GPU, for its cache",
    )
    window_steps: int = Field(
        ComputeConfig.window_steps,
        ge=1,
        le=64,
        description="decode steps that a GPU takes before the host reads their tokens; 1 switches "
        "windows off",
    )
    cuda_graphs: bool = Field(
        ComputeConfig.cuda_graphs, description="launch decode steps on a GPU as CUDA graphs"
    )
    cuda_prefetch: bool = Field(
        ComputeConfig.cuda_prefetch,
        description="prefetch weights and caches into a GPU's second-level cache",
    )
    cuda_small_products: bool = Field(
        ComputeConfig.cuda_small_products,
        description="use Nightjar's kernel for products of up to 8 rows; else cuBLAS",
    )
    cuda_fused_heads: bool = Field(
        ComputeConfig.cuda_fused_heads,
        description="let decode attention on a GPU normalise, rotate and cache its heads",
    )
    host_cache_bytes: int = Field(
        ComputeConfig.host_cache_bytes,
        ge=0,
        description="host memory for keys and values that the cache has no room for; 0 for none",
    )
    prompt_vector_bytes: int = Field(
        ComputeConfig.prompt_vector_bytes,
        ge=1,
        description="host memory of compute processes for prompt vectors, all models of a worker "
        "together; the least recently used leave, requests in flight keep theirs",
    )
    engine: EngineKind = Field(
        ComputeConfig.engine,
        description="fake: answers are made up without a model, to test and time what is around it",
    )
    fake_step_s: float = Field(
        ComputeConfig.fake_step_s, ge=0, description="seconds that a step of the fake engine takes"
    )

    plan_chunk_requests: int = Field(4096, ge=1, description="requests planned in one transaction")
    plan_chunk_bytes: int = Field(
        8 << 20, ge=1, description="bytes of request bodies that the planner holds at once"
    )
    plan_chunk_tokens: int = Field(
        1 << 20, ge=1, description="tokens that the planner holds at once, but for one request's"
    )
    plan_attempts: int = Field(
        5, ge=1, description="failures in a row of a job's planning which make the job fail"
    )
    micro_batch_requests: int = Field(128, ge=1, description="most requests in one micro-batch")
    micro_batch_tokens: int = Field(16_384, ge=1, description="token budget of one micro-batch")
    dispatch_window: int = Field(
        16,
        ge=1,
        description="micro-batches in the broker or in flight; the rest wait in SQL. Where workers "
        "hold many leases there are up to three times as many as those",
    )

    worker_niceness: int = Field(
        10, ge=0, le=19, description="priority of planners, workers and uploads, given up to polls"
    )
    worker_stuck_after_s: float = Field(
        60.0,
        gt=0,
        description="a worker with an idle thread that takes nothing for so long while messages "
        "wait for it ends, to be started again",
    )
    worker_threads: int = Field(
        4, ge=1, description="micro-batches of jobs in one engine at a time"
    )
    worker_live_threads: int = Field(
        16,
        ge=1,
        description="single calls in one GPU worker at a time, beside the micro-batches of jobs",
    )
    heartbeat_s: float = Field(1.0, gt=0)
    worker_dead_after_s: float = Field(7.0, gt=0)
    drain_s: float = Field(
        90.0,
        ge=0,
        description="seconds that a GPU worker told to end continues to compute what it has begun; "
        "then it gives the rest back",
    )
    redispatch_after_s: float = Field(20.0, gt=0)
    sweep_every_s: float = Field(1.0, gt=0)
    request_crashes: int = Field(
        3, ge=1, description="crashes of a request that is computed alone which make it fail"
    )
    request_worker_deaths: int = Field(
        10,
        ge=1,
        description="deaths of a worker, for whatever reason, beside a request that is computed "
        "alone which make it fail",
    )
    compute_stalled_after_s: float = Field(
        ComputeConfig.stalled_after_s,
        gt=0,
        description="a compute process without a step for so long is ended",
    )
    compute_threads: int | None = Field(
        ComputeConfig.threads,
        ge=1,
        description="CPU threads of the engine, all its shards together",
    )
    shards: int | None = Field(
        None, ge=1, description="processes that the model is split among; one a device by default"
    )
    devices: str = Field(
        "",
        validate_default=True,
        description="CUDA devices of this worker, one a shard, such as 0,1: positions in "
        "CUDA_VISIBLE_DEVICES if that is set, else the numbers of nvidia-smi; empty for "
        "NIGHTJAR_DEVICE",
    )
    rank_late_after_s: float = Field(
        ComputeConfig.rank_late_after_s,
        gt=0,
        description="a shard that keeps the others waiting for so long is ended with them",
    )

    reuse_results: bool = Field(
        False, description="answer requests that an earlier job has asked from what was kept of it"
    )
    result_cache_url: SecretStr | None = Field(
        None, description="database of the answers that are kept; the jobs' own unless given"
    )
    result_cache_rows: int = Field(1_000_000, ge=1, description="most answers that are kept")
    result_cache_scores: int = Field(
        10_000_000, ge=1, description="most scores of documents that are kept"
    )
    result_cache_days: float = Field(30.0, gt=0, description="answers older than this are dropped")

    keep_results_days: float | None = Field(
        None,
        ge=1 / 24,
        le=36_500,
        description="the requests and results of a job are deleted so long after its end; by "
        "default they are kept for ever",
    )

    bad_lines_in_a_row: int = Field(
        1000, ge=1, description="`nightjar run` reads no further after so many unusable lines"
    )

    @field_validator("broker_url")
    @classmethod
    def _names_a_broker(cls, url: SecretStr) -> SecretStr:
        # Kombu takes a URL without a scheme for AMQP and tries to connect for ever.
        scheme, colon, _ = url.get_secret_value().partition("://")
        if not colon or scheme not in _BROKERS:
            raise ValueError(
                "a broker's URL begins with redis:// (or rediss://, redis+socket://, sentinel://); "
                "write redis://:PASSWORD@HOST:6379/0"
            )
        return url

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
    def all_worker_threads(self) -> int:
        """Threads of a GPU worker's pool: for jobs some for each model, and those for calls."""
        return self.worker_threads * max(1, len(self.model_paths)) + self.worker_live_threads

    @property
    def keep_results_s(self) -> float | None:
        """The retention in seconds; None for ever."""
        days = self.keep_results_days
        return None if days is None else days * 86_400.0

    @property
    def device_list(self) -> tuple[str, ...]:
        """The CUDA devices by rank; empty for the CPU."""
        return tuple(self.devices.split(",")) if self.devices else ()

    @property
    def shard_count(self) -> int:
        """How many processes compute the model."""
        return self.shards or len(self.device_list) or 1

    @classmethod
    def read(cls, **given: Any) -> Self:
        """Read the environment; `given` fields take precedence.

        Raises:
            SettingsError: A variable cannot be used, or its name is nearly that of a setting.
        """
        for name, like in unknown_variables(os.environ, cls.model_fields):
            if like is not None:
                raise SettingsError(f"{name}: there is no such setting; did you mean {like}?")
            logger.warning("%s: no setting has that name; it is passed over", name)
        try:
            return cls(**given)
        except ValidationError as error:
            # Not the error's own text: it repeats values, and a URL holds a password.
            faults = [
                f"{_variable(fault['loc'][0])}: {fault['msg'].removeprefix('Value error, ')}"
                for fault in error.errors()
            ]
            raise SettingsError("; ".join(faults)) from None


def _variable(field: int | str) -> str:
    return f"NIGHTJAR_{field}".upper()
