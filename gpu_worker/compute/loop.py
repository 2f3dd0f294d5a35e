"""The compute process: one engine, fed over a pipe, `python -m nightjar.gpu_worker.compute`.

It ends with its worker: the pipe closes, and if the process hangs, the operating system kills it.
Nothing but its worker, and the other ranks of its group, reaches it.
"""

import logging
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from nightjar.checkpoints import CheckpointError, ModelDirectory, Tokenizer
from nightjar.gpu_worker.compute import messages
from nightjar.gpu_worker.compute.fake_engine import FakeEngine
from nightjar.gpu_worker.compute.translation import Translator
from nightjar.gpu_worker.engine import Result
from nightjar.gpu_worker.engine.errors import CannotComputeError
from nightjar.gpu_worker.shards.activity import Activity, Doing
from nightjar.gpu_worker.shards.process import GroupMember, begin, leave, leaving_when_lost
from nightjar.gpu_worker.shards.startup import StartUp
from nightjar.process import keep_freed_memory, spare_what_stays

if TYPE_CHECKING:
    from nightjar.gpu_worker.engine import Engine

logger = logging.getLogger(__name__)

# How often a working engine reports that it is alive.
_LIFE_SIGN_S = 1.0
_TELL_EVERY_S = 1.0


class ComputeLoop:
    """Moves messages between the pipe and the engine, one step at a time."""

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
        self._reported_at = 0.0
        self._told_at = 0.0  # of the engine's statistics
        self._told_steps = -1  # how many steps they covered

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
            if not self._engine.has_work:
                self._tell_when_due()
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
                from safetensors.torch import load  # imported late: see _choose_engine

                tensors = load(message.data)
                if message.kind == "lora":
                    self._engine.register_adapter(message.key, tensors)
                else:
                    self._engine.register_prompt_vectors(message.key, *tensors.values())
            case messages.ForgetVectors():
                self._engine.forget(message.key)
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

    def _tell_when_due(self) -> None:
        """Send the statistics of the last steps before a pause, unless a message comes first."""
        if self._told_steps == self._steps:
            return
        with self._activity.waiting(Doing.IDLE):
            wait_s = self._told_at + _TELL_EVERY_S - time.monotonic()
            if self._pipe.poll(max(0.0, wait_s)):
                return
            try:
                self._pipe.send_bytes(messages.encode([self._statistics()]))
            except OSError as error:
                raise EOFError from error  # the worker has closed the pipe meanwhile

    def _statistics(self) -> messages.Statistics:
        self._told_at, self._told_steps = time.monotonic(), self._steps
        return messages.Statistics(self._engine.statistics())

    def _send(self, outcomes: list[Result]) -> None:
        frame: list[messages.FromCompute] = [self._answer(one) for one in outcomes]
        now = time.monotonic()
        if now - self._told_at >= _TELL_EVERY_S:
            frame.append(self._statistics())
        if frame or now - self._reported_at >= _LIFE_SIGN_S:
            # First, so that what these steps took counts for the requests that end here as well.
            frame.insert(0, messages.Stepped(steps=self._steps, busy_s=self._busy_s))
            self._pipe.send_bytes(messages.encode(frame))
            self._reported_at = now


def _failed(ticket: int, error: Exception) -> messages.Failed:
    """Return the answer to a request that cannot be translated; the others are computed."""
    return messages.Failed(ticket, "internal_error", f"{type(error).__name__}: {error}")


def main() -> int:
    """Load the model, report it and serve; return the exit status."""
    start, member = begin()
    with leaving_when_lost():
        status = _serve(start, member, Connection(start.pipe))
    if member.ranks > 1:
        leave(status)
    return status


def _serve(start: StartUp, member: GroupMember, pipe: Connection) -> int:
    """Load the model and compute until the worker closes the pipe; return the exit status."""
    started = time.monotonic()
    keep_freed_memory()
    try:
        directory = ModelDirectory.open(start.config.model)
        tokenizer = directory.tokenizer()
        engine, dtype = _choose_engine(start, member, directory, tokenizer)
        if start.config.stamp:  # after loading: the worker has read these files and no others
            directory.check_unchanged(start.config.stamp)
        _verify(start, directory, engine)
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
    ComputeLoop(engine, Translator(tokenizer), pipe, member.activity).run()
    return 0


def _verify(start: StartUp, directory: ModelDirectory, engine: "Engine | FakeEngine") -> None:
    """Verify a model that starts for the first time; CannotComputeError if it is damaged."""
    if not start.config.unverified or isinstance(engine, FakeEngine):
        return
    from nightjar.gpu_worker.verify.first_start import verify_first_start

    verify_first_start(directory, engine, start.config.unverified)


def _choose_engine(
    start: StartUp, member: GroupMember, directory: ModelDirectory, tokenizer: Tokenizer
) -> tuple["Engine | FakeEngine", str]:
    """Return the engine that the start-up message asks for, and its precision."""
    if start.config.engine == "fake":
        logger.warning("fake engine: answers are made up, no model is loaded")
        return FakeEngine(tokenizer.token_bytes, step_s=start.config.fake_step_s), "fake"
    # Imported late: torch takes two seconds and 150 MiB, which a fake engine does not need.
    from nightjar.gpu_worker.compute.model_engine import open_engine

    return open_engine(start, member, directory, tokenizer)
