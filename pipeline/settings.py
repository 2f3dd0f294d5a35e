"""Settings of every Nightjar process, read from `NIGHTJAR_*` environment variables."""

import re
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

Dtype = Literal["auto", "fp64", "fp32", "bf16", "fp16", "int8"]


class SettingsError(Exception):
    """A setting is missing or cannot be used; the message names the variable."""


class Settings(BaseSettings):
    """One frozen configuration for the planner, the workers, the API and the command line.

    Every field is the environment variable `NIGHTJAR_<FIELD>`, for example
    `NIGHTJAR_DATABASE_URL`. Units stand in the names: `_s` seconds, `_bytes` bytes.
    """

    model_config = SettingsConfigDict(env_prefix="NIGHTJAR_", frozen=True, extra="forbid")

    database_url: SecretStr = SecretStr("sqlite:///nightjar.db")
    broker_url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")

    model: Path | None = Field(None, description="directory of the model that the workers serve")
    model_name: str | None = Field(
        None, description="name that requests and answers carry; the directory's unless given"
    )
    dtype: Dtype = "auto"
    device: str = Field("cpu", description="cpu, cuda or cuda:<number>")
    kv_cache_bytes: int | None = Field(
        None,
        ge=1,
        description="memory for keys and values, of each shard; 1 GiB on a CPU unless given, and "
        "on a GPU gpu_memory_share",
    )
    gpu_memory_share: float = Field(
        0.85, gt=0, lt=1, description="share of the GPU's memory, left by the model, for its cache"
    )
    host_cache_bytes: int = Field(
        0,
        ge=0,
        description="host memory for keys and values that the cache has no room for; 0 for none",
    )
    engine: Literal["model", "fake"] = Field(
        "model",
        description="fake: answers are made up without a model, to test and time what is around it",
    )
    fake_step_s: float = Field(
        0.0, ge=0, description="seconds that a step of the fake engine takes"
    )
    accept_any_model: bool = Field(
        False, description="compute requests whatever model name their body gives"
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
    worker_threads: int = Field(4, ge=1, description="micro-batches in one engine at a time")
    heartbeat_s: float = Field(1.0, gt=0)
    worker_dead_after_s: float = Field(8.0, gt=0)
    drain_s: float = Field(
        90.0,
        ge=0,
        description="seconds that a GPU worker told to end goes on computing what it has begun; "
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
        120.0, gt=0, description="a compute process without a step for so long is ended"
    )
    compute_threads: int | None = Field(
        None, ge=1, description="CPU threads of the engine, all its shards together"
    )
    shards: int | None = Field(
        None, ge=1, description="processes that the model is split among; one a device by default"
    )
    devices: str = Field(
        "",
        validate_default=True,
        description="CUDA devices of this worker, one a shard, such as 0,1: places in "
        "CUDA_VISIBLE_DEVICES where that is set, else numbers as nvidia-smi gives them; empty for "
        "what NIGHTJAR_DEVICE says",
    )
    rank_late_after_s: float = Field(
        8.0,
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

    max_upload_bytes: int = Field(1 << 30, ge=1)
    upload_stalled_after_s: float = Field(
        60.0, gt=0, description="an upload that sends nothing for so long is refused"
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
        """The CUDA devices by rank; none for the CPU."""
        return tuple(self.devices.split(",")) if self.devices else ()

    @property
    def shard_count(self) -> int:
        """How many processes compute the model."""
        return self.shards or len(self.device_list) or 1

    @classmethod
    def read(cls, **given: Any) -> Self:
        """The settings of the environment, with `given` fields over them.

        Raises:
            SettingsError: A variable cannot be used.
        """
        try:
            return cls(**given)
        except ValidationError as error:
            # Not the error's own text: it repeats values, and a URL holds a password.
            faults = [
                f"{_variable(fault['loc'][0])}: {fault['msg'].removeprefix('Value error, ')}"
                for fault in error.errors()
            ]
            raise SettingsError("; ".join(faults)) from None

    @cached_property
    def broker_transport_options(self) -> dict[str, object]:
        """Options of kombu's Redis transport; docs/structure.md says why each is set."""
        return {
            "visibility_timeout": 1800,
            "unacked_restore_interval": 5,
            "unacked_restore_throttle": 1,
            "priority_steps": [0, 9],
            "queue_order_strategy": "round_robin",
            "socket_timeout": 30,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 10,
        }


def _variable(field: int | str) -> str:
    return f"NIGHTJAR_{field}".upper()
