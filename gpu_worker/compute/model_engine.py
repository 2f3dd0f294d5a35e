"""Builds the engine that computes with the model: here alone, or as rank 0 of several."""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection

import torch

from nightjar.checkpoints import PROMPT_TOKEN, ModelDirectory, Tokenizer
from nightjar.gpu_worker.engine import GPU_MEMORY_SHARE, EngineConfig
from nightjar.gpu_worker.engine.errors import CannotComputeError
from nightjar.gpu_worker.engine.gpu_memory import cache_budget
from nightjar.gpu_worker.engine.loop import Engine
from nightjar.gpu_worker.models import Decoder, load_model
from nightjar.gpu_worker.models.chosen_dtype import chosen_dtype
from nightjar.gpu_worker.models.precision import MORE_PRECISE
from nightjar.gpu_worker.shards.collective import TorchCollective, require_device
from nightjar.gpu_worker.shards.leader import Leader
from nightjar.gpu_worker.shards.process import Place
from nightjar.gpu_worker.shards.switches import switch_off
from nightjar.kernels.device import DeviceError, use_device, warm_up

GPU_RUNNING = 256
"""Texts that decode together: a step reads the weights once for all of them."""

GPU_STEP_TOKENS = 8192
"""Rows of a step: enough for the products of a prompt to be bound by arithmetic."""

Load = Callable[[str], Decoder]
"""Loads the model in a precision."""


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Memory for keys and values.

    kv_bytes: on the device; None for `gpu_share` of what the model leaves free on a GPU, and on a
    CPU for what an engine takes unless told.
    host_bytes: below that, in the host's memory.
    """

    kv_bytes: int | None = None
    gpu_share: float = GPU_MEMORY_SHARE
    host_bytes: int = 0

    def kv_bytes_on(self, device: str, elsewhere: Sequence[int] = ()) -> int | None:
        """What is to be taken on a device that holds its model already; None: say nothing.

        elsewhere: see `cache_budget`.
        """
        if self.kv_bytes is None and device != "cpu":
            return cache_budget(device, self.gpu_share, elsewhere)
        return self.kv_bytes


def open_engine(
    args: argparse.Namespace, place: Place, directory: ModelDirectory, tokenizer: Tokenizer
) -> tuple[Engine, str]:
    """The engine that the compute process's arguments ask for, and what it computes in.

    Raises:
        CannotComputeError: The device cannot be used, the kernels cannot be compiled, or the cache
            cannot fit into memory.
        CheckpointError, ValueError: See `build_engine`.
    """
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if place.ranks > 1:
        require_device(args.device, place.rank)
    try:
        warm_up()
        device = use_device(args.device)
    except DeviceError as error:
        raise CannotComputeError(str(error)) from error
    switch_off(args.without, args.window_steps, device)
    dtype = args.dtype
    if dtype == "auto":
        # Both 16-bit formats are as fast on a GPU; bf16 has the range of FP32.
        dtype = chosen_dtype() if device == "cpu" else "bf16"
    if device == "cpu" and args.kv_cache_bytes is not None:
        _require_memory(args.kv_cache_bytes * place.ranks)
    memory = CacheMemory(args.kv_cache_bytes, args.gpu_memory_share, args.host_cache_bytes)
    load = _loader(args, place, directory, device)
    base = EngineConfig(
        window_steps=args.window_steps, cuda_graphs="cuda_graphs" not in args.without
    )
    try:
        engine = build_engine(
            directory, tokenizer, dtype, load, device=device, memory=memory, base=base
        )
    except torch.OutOfMemoryError as error:
        raise CannotComputeError(
            f"the model and its cache do not fit into the free memory of {device}: end what else "
            "uses it, take a GPU with more, split the model with --shards, or lower "
            f"NIGHTJAR_KV_CACHE_BYTES if it is set ({error})"
        ) from error
    return engine, dtype


def build_engine(
    directory: ModelDirectory,
    tokenizer: Tokenizer,
    dtype: str,
    load: Load,
    *,
    device: str = "cpu",
    memory: CacheMemory = CacheMemory(),
    base: EngineConfig | None = None,
) -> Engine:
    """Load the model and build its engine.

    base: the engine's settings, but for the memory and the batch, which the device decides.

    A higher precision is computed in on the CPU: the GPU's memory is spoken for. A model that is
    split among GPUs has none: rank 0 would have to hold it whole in the host's memory.

    Raises:
        CheckpointError: The weights do not fit the configuration, cannot be split as asked, or the
            GPU has no kernels for them.
        ValueError: The device does not compute in that dtype, or the memory holds no block.
    """
    prompt_id = tokenizer.token_id(PROMPT_TOKEN)
    banned = () if prompt_id is None else (prompt_id,)
    model = load(dtype)
    config = replace(
        base or EngineConfig(), banned_token_ids=banned, host_cache_bytes=memory.host_bytes
    )
    if device != "cpu":
        config = replace(config, max_running=GPU_RUNNING, max_step_tokens=GPU_STEP_TOKENS)
    if (kv_bytes := memory.kv_bytes_on(device, model.free_elsewhere)) is not None:
        config = replace(config, kv_cache_bytes=kv_bytes)
    higher = MORE_PRECISE.get(dtype)
    more_precise = None
    if higher is not None and not (model.in_lockstep and device != "cpu"):
        again = load if device == "cpu" else partial(load_model, directory)
        more_precise = partial(again, higher)
    return Engine(model, tokenizer.token_bytes, config, more_precise)


def _require_memory(kv_cache_bytes: int) -> None:
    """Refuse what cannot be there before the system has to kill somebody for it."""
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if kv_cache_bytes >= present:
        raise CannotComputeError(
            f"the KV cache is to take {kv_cache_bytes} bytes, and the machine has {present}: "
            "lower NIGHTJAR_KV_CACHE_BYTES"
        )


def _loader(args: argparse.Namespace, place: Place, directory: ModelDirectory, device: str) -> Load:
    """What loads the model: here alone, or as rank 0 of several."""
    if place.ranks == 1:
        return partial(load_model, directory, device=device)
    followers = [Connection(int(number)) for number in args.followers.split(",")]
    join = partial(TorchCollective, place, device)
    return Leader(directory, followers, device, join, place.activity).load
