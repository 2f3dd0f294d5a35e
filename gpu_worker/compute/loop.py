"""The compute process: one engine, fed over a pipe, `python -m nightjar.gpu_worker.compute`.

It ends when its worker does: the pipe closes, and the kernel ends it where it hangs. Nothing else
reaches it.
"""

import argparse
import logging
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from nightjar import logs
from nightjar.checkpoints import CheckpointError, ModelDirectory, Tokenizer
from nightjar.gpu_worker.compute import messages
from nightjar.gpu_worker.compute.fake_engine import FakeEngine
from nightjar.gpu_worker.compute.translation import Translator
from nightjar.gpu_worker.engine import GPU_MEMORY_SHARE, Result
from nightjar.gpu_worker.engine.errors import CannotComputeError
from nightjar.gpu_worker.shards.activity import Activity, Doing
from nightjar.gpu_worker.shards.process import (
    Place,
    add_place_arguments,
    leave,
    leaving_when_lost,
    live_no_longer_than_the_worker,
    place_of,
)
from nightjar.process import keep_freed_memory, spare_what_stays

if TYPE_CHECKING:
    from nightjar.gpu_worker.engine import Engine

logger = logging.getLogger(__name__)

# How often a working engine says that it is alive.
_LIFE_SIGN_S = 1.0


class ComputeLoop:
    """Moves messages between the pipe and the engine, a step at a time."""

    def __init__(
        self,
        engine: "Engine | FakeEngine",
        translator: Translator,
        pipe: Connection,
        activity: Activity,
    ) -> None:
        self._engine = engine
        self._translator = translator
        self._pipe = pipe
        self._activity = activity
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
            self._activity.progressed()

    def _receive(self) -> None:
        """Take every waiting message; block only when there is nothing to compute."""
        while not self._engine.has_work or self._pipe.poll():
            with self._activity.waiting(Doing.IDLE):
                frame = self._pipe.recv_bytes()
            for message in messages.decode_to_compute(frame):
                self._handle(message)
                self._activity.progressed()

    def _handle(self, message: messages.ToCompute) -> None:
        match message:
            case messages.Generate() | messages.Rank():
                self._submit(message)
            case messages.RegisterVectors():
                from safetensors.torch import load  # not above: see _choose_engine

                (vectors,) = load(message.data).values()
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
    parser.add_argument("--dtype", default="auto", help="what `load_model` knows, or auto")
    parser.add_argument("--kv-cache-bytes", type=int, default=None)
    parser.add_argument("--gpu-memory-share", type=float, default=GPU_MEMORY_SHARE)
    parser.add_argument("--host-cache-bytes", type=int, default=0)
    parser.add_argument("--window-steps", type=int, default=8, help="decode steps on a GPU")
    parser.add_argument("--engine", choices=("model", "fake"), default="model")
    parser.add_argument("--fake-step-s", type=float, default=0.0, help="seconds of a fake step")
    parser.add_argument("--stamp", default="", help="of the files that the worker has read")
    parser.add_argument("--pipe", type=int, required=True, help="file descriptor of the pipe")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of torch")
    parser.add_argument("--followers", default="", help="file descriptors to ranks 1, 2, ...")
    add_place_arguments(parser)
    args = parser.parse_args()
    live_no_longer_than_the_worker(args.worker)
    place = place_of(args)
    logs.configure("compute")
    with leaving_when_lost():
        status = _serve(args, place, Connection(args.pipe))
    if place.ranks > 1:
        leave(status)
    return status


def _serve(args: argparse.Namespace, place: Place, pipe: Connection) -> int:
    """Load the model and compute until the worker closes the pipe; returns the exit status."""
    started = time.monotonic()
    keep_freed_memory()
    try:
        directory = ModelDirectory.open(args.model)
        tokenizer = directory.tokenizer()
        engine, dtype = _choose_engine(args, place, directory, tokenizer)
        if args.stamp:  # after loading: the worker speaks for these files and no others
            directory.check_unchanged(args.stamp)
    except (CheckpointError, CannotComputeError, MemoryError, ValueError) as error:
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
    ComputeLoop(engine, Translator(tokenizer), pipe, place.activity).run()
    return 0


def _choose_engine(
    args: argparse.Namespace, place: Place, directory: ModelDirectory, tokenizer: Tokenizer
) -> tuple["Engine | FakeEngine", str]:
    """The engine that was asked for, and what it computes in."""
    if args.engine == "fake":
        logger.warning("fake engine: answers are made up, no model is loaded")
        return FakeEngine(tokenizer.token_bytes, step_s=args.fake_step_s), "fake"
    # Here and not above: it takes torch, two seconds and 150 MiB that a fake engine does without.
    from nightjar.gpu_worker.compute.model_engine import open_engine

    return open_engine(args, place, directory, tokenizer)
