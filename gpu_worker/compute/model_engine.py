"""Builds the engine of a compute process, which is alone or rank 0 of several."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import torch

from nightjar.checkpoints import PROMPT_TOKEN, ModelDirectory, Tokenizer
from nightjar.compute_config import ComputeConfig, precision_with_cache
from nightjar.gpu_worker.engine import EngineConfig
from nightjar.gpu_worker.engine.errors import CannotComputeError
from nightjar.gpu_worker.engine.gpu_memory import cache_budget, recorded_bytes
from nightjar.gpu_worker.engine.loop import Engine
from nightjar.gpu_worker.models import Decoder, load_model
from nightjar.gpu_worker.models.chosen_dtype import chosen_dtype
from nightjar.gpu_worker.models.plan_rules import planned_precision
from nightjar.gpu_worker.models.precision import MORE_PRECISE
from nightjar.gpu_worker.models.shared_weights import load_shared
from nightjar.gpu_worker.shards.collective import TorchCollective, require_device
from nightjar.gpu_worker.shards.process import GroupMember
from nightjar.gpu_worker.shards.rank_zero import RankZero
from nightjar.gpu_worker.shards.startup import StartUp
from nightjar.gpu_worker.shards.switches import apply_switches
from nightjar.kernels.device import DeviceError, use_device, warm_up

logger = logging.getLogger(__name__)

GPU_RUNNING = 256
"""Sequences that decode together: a step reads the weights once for all of them."""

GPU_STEP_TOKENS = 8192
"""Rows of one step. With so many, the products of a prefill are limited by arithmetic."""

Load = Callable[[str], Decoder]
"""Loads the model in a precision."""


def open_engine(
    start: StartUp, member: GroupMember, directory: ModelDirectory, tokenizer: Tokenizer
) -> tuple[Engine, str]:
    """Build the engine that a start-up message asks for; return it with its precision.

    Raises:
        CannotComputeError: The device cannot be used or does not compute in FP8, the kernels cannot
            be compiled, or the cache does not fit into memory.
        CheckpointError, ValueError: See `build_engine`.
    """
    config = start.config
    if config.threads_per_rank is not None:
        torch.set_num_threads(config.threads_per_rank)
    if member.ranks > 1:
        require_device(config.rank_device, member.rank)
    try:
        warm_up()
        device = use_device(config.rank_device)
    except DeviceError as error:
        raise CannotComputeError(str(error)) from error
    apply_switches(config, device, member.rank)
    dtype: str = config.dtype
    if dtype == "auto":
        # Both 16-bit formats are equally fast on a GPU; bf16 has the range of FP32.
        dtype = chosen_dtype() if device == "cpu" else "bf16"
    if dtype == "fp8" and device == "cpu":
        raise CannotComputeError(
            "products in FP8 need a GPU of compute capability 8.9 or later, and this worker "
            "computes on a CPU: use int8, whose weights are as small"
        )
    if device == "cpu" and config.kv_cache_bytes is not None:
        _require_memory(config.kv_cache_bytes * member.ranks)
    if config.kv_cache_dtype == "fp8" and device == "cpu":
        logger.warning(
            "keys and values are in FP8: on a CPU that saves memory, and attention is slower, "
            "because torch computes it",
            extra={"action": "fp8_cache_on_cpu"},
        )
    load = _loader(start, member, directory, device)
    try:
        engine = build_engine(config, directory, tokenizer, load, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        raise CannotComputeError(
            f"the model and its cache do not fit into the free memory of {device}: end what else "
            "uses it, take a GPU with more, split the model with --shards, or lower "
            f"NIGHTJAR_KV_CACHE_BYTES if it is set ({error})"
        ) from error
    precision = planned_precision(directory, dtype)
    return engine, precision_with_cache(precision, config.kv_cache_dtype)


def build_engine(
    config: ComputeConfig,
    directory: ModelDirectory,
    tokenizer: Tokenizer,
    load: Load,
    *,
    dtype: str,
    device: str = "cpu",
) -> Engine:
    """Load the model and build its engine.

    Requests whose scores overflow are computed again in a higher precision, on the CPU. A model
    split among GPUs does without: rank 0 would need all of it in the host's memory.

    Args:
        config: Settings of the memory and of the decode steps.
        directory: The model.
        tokenizer: Of the model.
        load: Loads the model, or rank 0's part of it.
        dtype: The precision; never "auto".
        device: "cpu", or a GPU with its number.

    Raises:
        CheckpointError: The weights do not fit the model's configuration, cannot be split as asked,
            or the GPU has no kernels for them.
        ValueError: The device does not compute in that precision, or the memory holds no block.
    """
    prompt_id = tokenizer.token_id(PROMPT_TOKEN)
    model = load(dtype)
    engine_config = EngineConfig(
        banned_token_ids=(*tokenizer.padding_ids, *(() if prompt_id is None else (prompt_id,))),
        fp8_cache=config.kv_cache_dtype == "fp8",
        host_cache_bytes=config.host_cache_bytes,
        window_steps=config.window_steps,
        cuda_graphs=config.cuda_graphs,
    )
    if device != "cpu":
        engine_config = replace(
            engine_config, max_running=GPU_RUNNING, max_step_tokens=GPU_STEP_TOKENS
        )
    recorded = 0 if device == "cpu" else recorded_bytes(model, engine_config)
    kv_bytes = kv_cache_bytes(config, device, model.free_elsewhere, recorded)
    if kv_bytes is not None:
        engine_config = replace(engine_config, kv_cache_bytes=kv_bytes)
    higher = MORE_PRECISE.get(dtype)
    more_precise = None
    if higher is not None and not (model.in_lockstep and device != "cpu"):
        again = load if device == "cpu" else partial(load_model, directory)
        more_precise = partial(again, higher)
    return Engine(model, tokenizer.token_bytes, engine_config, more_precise)


def kv_cache_bytes(
    config: ComputeConfig, device: str, elsewhere: Sequence[int] = (), recorded: int = 0
) -> int | None:
    """Return the cache's size on a device that holds its model already.

    None means the engine's default.

    elsewhere, recorded: Free bytes of the other ranks' GPUs, and what CUDA graphs hold; see
        `cache_budget`.
    """
    if config.kv_cache_bytes is None and device != "cpu":
        return cache_budget(device, config.gpu_memory_share, elsewhere, recorded)
    return config.kv_cache_bytes


def _require_memory(kv_cache_bytes: int) -> None:
    """Raise CannotComputeError for a cache larger than the machine's memory.

    Otherwise the system would kill a process for it, perhaps another one.
    """
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if kv_cache_bytes >= present:
        raise CannotComputeError(
            f"the KV cache is to take {kv_cache_bytes} bytes, and the machine has {present}: "
            "lower NIGHTJAR_KV_CACHE_BYTES"
        )


def _loader(start: StartUp, member: GroupMember, directory: ModelDirectory, device: str) -> Load:
    """Return what loads the model: all of it, or rank 0's part together with the other ranks."""
    if member.ranks == 1:
        load = partial(load_model, directory, device=device)
        folder = start.config.shared_weights
        if folder is None or device != "cpu":
            return load
        return lambda dtype: load_shared(directory, dtype, folder, load)
    followers = [Connection(descriptor) for descriptor in start.followers]
    join = partial(TorchCollective, member, device)
    return RankZero(directory, followers, device, join, member.activity).load
