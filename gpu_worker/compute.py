"""The compute process: one engine, fed over a pipe, `python -m nightjar.gpu_worker.compute`.

It ends when its worker does: the pipe closes, and the kernel ends it where it hangs. Nothing else
reaches it.
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from safetensors.torch import load as load_safetensors

from nightjar import logs
from nightjar.checkpoints import PROMPT_TOKEN, CheckpointError, ModelDirectory, Tokenizer
from nightjar.gpu_worker import messages
from nightjar.gpu_worker.engine import (
    Engine,
    EngineConfig,
    Result,
)
from nightjar.gpu_worker.engine.gpu_memory import GPU_MEMORY_SHARE, cache_budget
from nightjar.gpu_worker.fake_engine import FakeEngine
from nightjar.gpu_worker.models import Decoder, load_model
from nightjar.gpu_worker.models.precision import MORE_PRECISE, PRECISIONS, fastest_dtype
from nightjar.gpu_worker.shards.collective import TorchCollective, require_device
from nightjar.gpu_worker.shards.leader import Leader
from nightjar.gpu_worker.shards.process import (
    Place,
    add_place_arguments,
    give_signs_of_life,
    leaving_when_lost,
    live_no_longer_than_the_worker,
    place_of,
)
from nightjar.gpu_worker.translation import Translator
from nightjar.kernels.cuda.device import DeviceError, use_device
from nightjar.kernels.native.build import NativeBuildError, library
from nightjar.process import spare_what_stays

logger = logging.getLogger(__name__)

# How often a working engine says that it is alive.
_LIFE_SIGN_S = 1.0

GPU_RUNNING = 256
"""Texts that decode together: a step reads the weights once for all of them."""

GPU_STEP_TOKENS = 8192
"""Rows of a step: enough for the products of a prompt to be bound by arithmetic."""

Load = Callable[[str], Decoder]
"""Loads the model in a precision."""


def build_engine(
    directory: ModelDirectory,
    tokenizer: Tokenizer,
    dtype: str,
    load: Load,
    *,
    device: str = "cpu",
    gpu_memory_share: float = GPU_MEMORY_SHARE,
    host_cache_bytes: int = 0,
) -> Engine:
    """Load the model and build its engine.

    A higher precision is computed in on the CPU: the GPU's memory is spoken for.

    Raises:
        CheckpointError: The weights do not fit the configuration, cannot be split as asked, or the
            GPU has no kernels for them.
        ValueError: The device does not compute in that dtype, or host_cache_bytes hold no block.
    """
    prompt_id = tokenizer.token_id(PROMPT_TOKEN)
    banned = () if prompt_id is None else (prompt_id,)
    model = load(dtype)
    config = EngineConfig(banned_token_ids=banned, host_cache_bytes=host_cache_bytes)
    if device != "cpu":
        config = replace(
            config,
            max_running=GPU_RUNNING,
            max_step_tokens=GPU_STEP_TOKENS,
            kv_cache_bytes=cache_budget(device, gpu_memory_share),
        )
    higher = MORE_PRECISE.get(dtype)
    more_precise = None
    if higher is not None:
        again = load if device == "cpu" else partial(load_model, directory)
        more_precise = partial(again, higher)
    return Engine(model, tokenizer.token_bytes, config, more_precise)


class ComputeLoop:
    """Moves messages between the pipe and the engine, a step at a time."""

    def __init__(
        self, engine: Engine | FakeEngine, translator: Translator, pipe: Connection
    ) -> None:
        self._engine = engine
        self._translator = translator
        self._pipe = pipe
        self._steps = 0
        self._busy_s = 0.0
        self._said_at = 0.0

    def run(self) -> None:
        """Serve until the worker closes the pipe."""
        while True:
            try:
                self._receive()
            except EOFError:
                return
            started = time.monotonic()
            outcomes = self._engine.step()
            self._busy_s += time.monotonic() - started
            self._steps += 1
            self._send(outcomes)

    def _receive(self) -> None:
        """Take every waiting message; block only when there is nothing to compute."""
        while not self._engine.has_work or self._pipe.poll():
            for message in messages.decode_to_compute(self._pipe.recv_bytes()):
                self._handle(message)

    def _handle(self, message: messages.ToCompute) -> None:
        match message:
            case messages.Generate() | messages.Rank():
                self._submit(message)
            case messages.RegisterVectors():
                (vectors,) = load_safetensors(message.data).values()
                self._engine.register_prompt_vectors(message.key, vectors)
            case messages.Cancel():
                for ticket in message.tickets:
                    self._engine.cancel(ticket)

    def _submit(self, message: messages.Generate | messages.Rank) -> None:
        try:
            self._engine.submit(self._translator.request(message))
        except Exception as error:
            logger.exception("request %d cannot be read", message.ticket)
            self._pipe.send_bytes(messages.encode([_failed(message.ticket, error)]))

    def _answer(self, outcome: Result) -> messages.Answer:
        try:
            return self._translator.answer(outcome)
        except Exception as error:
            logger.exception("result %d cannot be read", outcome.request_id)
            return _failed(outcome.request_id, error)

    def _send(self, outcomes: list[Result]) -> None:
        frame: list[messages.FromCompute] = [self._answer(one) for one in outcomes]
        now = time.monotonic()
        if frame or now - self._said_at >= _LIFE_SIGN_S:
            frame.append(messages.Stepped(steps=self._steps, busy_s=self._busy_s))
            self._pipe.send_bytes(messages.encode(frame))
            self._said_at = now


def _failed(ticket: int, error: Exception) -> messages.Failed:
    """A request that cannot be translated fails; the engine goes on with the others."""
    return messages.Failed(ticket, "internal_error", f"{type(error).__name__}: {error}")


def main() -> int:
    """Entry point: load, report, serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=("auto", *PRECISIONS), default="auto")
    parser.add_argument("--gpu-memory-share", type=float, default=GPU_MEMORY_SHARE)
    parser.add_argument("--host-cache-bytes", type=int, default=0)
    parser.add_argument("--engine", choices=("model", "fake"), default="model")
    parser.add_argument("--fake-step-s", type=float, default=0.0, help="seconds of a fake step")
    parser.add_argument("--pipe", type=int, required=True, help="file descriptor of the pipe")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of torch")
    parser.add_argument("--followers", default="", help="file descriptors to ranks 1, 2, ...")
    add_place_arguments(parser)
    args = parser.parse_args()
    live_no_longer_than_the_worker()
    logs.configure("compute")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    with leaving_when_lost():
        return _serve(args, Connection(args.pipe))


def _serve(args: argparse.Namespace, pipe: Connection) -> int:
    """Load the model and compute until the worker closes the pipe; returns the exit status."""
    started = time.monotonic()
    try:
        library()  # compiled now, not in the first step
        directory = ModelDirectory.open(args.model)
        tokenizer = directory.tokenizer()
        engine, dtype = _choose_engine(args, directory, tokenizer)
    except (CheckpointError, DeviceError, NativeBuildError, MemoryError, ValueError) as error:
        pipe.send_bytes(messages.encode([messages.LoadFailed(message=str(error))]))
        return 1
    load_s = time.monotonic() - started
    logger.info(
        "serving %s in %s after %.1f s",
        directory.name,
        dtype,
        load_s,
        extra={"action": "model_loaded", "dtype": dtype},
    )
    ready = messages.Ready(model=directory.name, dtype=dtype, load_s=load_s)
    pipe.send_bytes(messages.encode([ready]))
    spare_what_stays()
    ComputeLoop(engine, Translator(tokenizer), pipe).run()
    return 0


def _choose_engine(
    args: argparse.Namespace, directory: ModelDirectory, tokenizer: Tokenizer
) -> tuple[Engine | FakeEngine, str]:
    """The engine that was asked for, and what it computes in."""
    if args.engine == "fake":
        logger.warning("fake engine: answers are made up, no model is loaded")
        return FakeEngine(tokenizer.token_bytes, step_s=args.fake_step_s), "fake"
    place = place_of(args)
    if place.ranks > 1:
        require_device(args.device, place.rank)
    device = use_device(args.device)
    dtype = args.dtype
    if dtype == "auto":
        # Both 16-bit formats are as fast on a GPU; bf16 has the range of FP32.
        dtype = fastest_dtype() if device == "cpu" else "bf16"
    load = _loader(args, place, directory, device)
    engine = build_engine(
        directory,
        tokenizer,
        dtype,
        load,
        device=device,
        gpu_memory_share=args.gpu_memory_share,
        host_cache_bytes=args.host_cache_bytes,
    )
    return engine, dtype


def _loader(args: argparse.Namespace, place: Place, directory: ModelDirectory, device: str) -> Load:
    """What loads the model: here alone, or as rank 0 of several."""
    if place.ranks == 1:
        return partial(load_model, directory, device=device)
    give_signs_of_life(place.life)
    followers = [Connection(int(number)) for number in args.followers.split(",")]
    return Leader(directory, followers, device, partial(TorchCollective, place, device)).load


if __name__ == "__main__":
    sys.exit(main())
