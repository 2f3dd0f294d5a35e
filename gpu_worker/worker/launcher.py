"""Starts, feeds, watches and restarts the compute process.

The launcher uses neither Celery nor SQL. When the process dies or stalls, every flight with
unanswered requests is lost (`ComputeLostError`). A new process starts, and the caller decides what
happens to the requests.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait

from nightjar.children import ClosedError, RestartPolicy, Supervisor
from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.compute import messages
from nightjar.gpu_worker.worker.compute_group import ComputeGroup, Program, program
from nightjar.gpu_worker.worker.flights import (
    ComputeLostError,
    ComputeNotReadyError,
    EngineShares,
    InFlight,
    LauncherError,
)
from nightjar.gpu_worker.worker.resident_vectors import ResidentVectors
from nightjar.gpu_worker.worker.totals import Totals
from nightjar.jobs.vector_records import VectorFile

logger = logging.getLogger(__name__)

_WATCH_EVERY_S = 1.0
# Another start does not help a process that ends so often before its model is loaded.
RESTARTS = RestartPolicy(most_failures=3)


class Launcher:
    """Owns one compute process at a time; for a split model, one process a shard.

    The operating system ends a process with the thread that started it, at first the caller's.

    `totals` holds what all its processes have spent and counted.

    Args:
        config: How to start a process.
        on_failure: Called from the reading thread when no process can be started any more.
        program: What each rank runs.
    """

    def __init__(
        self,
        config: ComputeConfig,
        on_failure: Callable[[str], None],
        program: Program = program,
    ) -> None:
        self._config = config
        self._on_failure = on_failure
        self._tickets = itertools.count(1)
        # Held while requests are registered and written, so that both reach the same process.
        # Answers are read without it: a full pipe to the process must not stop them.
        self._send_lock = threading.Lock()
        self._pending_lock = threading.Lock()  # held for short times; taken after `_send_lock`
        self._pending: dict[int, InFlight] = {}
        self._shares = EngineShares()
        self._vectors = ResidentVectors(config.prompt_vector_bytes)
        self._ready = threading.Event()
        self._error: str | None = None
        self._precision: str = config.dtype
        self.totals = Totals()
        self._alive_at = time.monotonic()
        self._supervisor = Supervisor(partial(ComputeGroup, config, program), RESTARTS)
        self._group = self._spawn()
        self._reader = threading.Thread(target=self._read_forever, name="compute-reader")
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id of the compute process; with shards, of rank 0."""
        return self._group.pid

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks."""
        return self._group.pids

    @property
    def device(self) -> str:
        """Where the model is computed: cpu, cuda, or the numbers of its GPUs."""
        return ",".join(self._config.devices) or self._config.device

    @property
    def precision(self) -> str:
        """The precision of the loaded model; never "auto" once it is ready."""
        return self._precision

    @property
    def in_flight(self) -> int:
        """How many requests the compute process has not answered yet."""
        return len(self._pending)

    def wait_ready(self) -> None:
        """Block until the model is loaded.

        Raises:
            LauncherError: It cannot be loaded; the message says why.
        """
        self._ready.wait()
        self._check()

    def next_ticket(self) -> int:
        """A number for one request, which no other request of this launcher has."""
        return next(self._tickets)

    def missing_vectors(self, keys: Iterable[str]) -> list[str]:
        """The keys of prompt vectors and adapters whose files `submit` needs."""
        with self._send_lock:
            return self._vectors.missing(keys)

    def submit(
        self,
        asked: Sequence[messages.Generate | messages.Rank],
        keys: Collection[str] = (),
        vectors: Mapping[str, VectorFile] | None = None,
    ) -> InFlight:
        """Send requests in one frame.

        Args:
            asked: The requests, each with a ticket of its own from `next_ticket`.
            keys: Of the prompt vectors and adapters that they name.
            vectors: The file of each key that `missing_vectors` returned; without data for a key
                that does not exist.

        Raises:
            LauncherError: No compute process can be started.
            VectorsMissingError: More vectors are missing than before, because the process was
                replaced or others needed the room.
        """
        tickets = [message.ticket for message in asked]
        flight = InFlight(tickets, keys)
        with self._send_lock:
            self._check()
            told = self._vectors.use(keys, vectors or {}, self._vectors_in_flight)
            with self._pending_lock:
                if not self._pending:
                    self._alive_at = time.monotonic()
                self._pending.update(dict.fromkeys(tickets, flight))
                self._shares.join(flight)
            self._send([*told, *asked])
        return flight

    def cancel(self, flight: InFlight) -> None:
        """Cancel the requests without an answer; they get none."""
        with self._pending_lock:
            waiting = [ticket for ticket in flight.tickets if self._pending.pop(ticket, None)]
            for ticket in waiting:
                flight.end(ticket, None)
        with self._send_lock:
            self._send([messages.Cancel(tickets=waiting)])

    def release(self) -> None:
        """Give up all flights, with a ComputeNotReadyError."""
        self._fail_pending(ComputeNotReadyError("the worker ends"))

    def close(self) -> None:
        """End the process: TERM, then KILL after a grace period."""
        self._supervisor.close()
        with self._send_lock:
            self._group.terminate()
        self._reader.join()

    def _check(self) -> None:
        if self._error is not None:
            raise LauncherError(self._error)

    def _spawn(self) -> ComputeGroup:
        group = self._supervisor.start()
        self._alive_at = time.monotonic()
        return group

    def _send(self, frame: Sequence[messages.ToCompute]) -> None:
        """Write one frame; the reading thread notices a process that is gone."""
        try:
            self._group.pipe.send_bytes(messages.encode(frame))
        except OSError as error:
            logger.warning("compute process does not listen: %s", error)

    def _read_forever(self) -> None:
        try:
            while not self._supervisor.closed and self._error is None:
                self._read()
        except Exception as error:
            # Without this thread no answer comes: fail all flights.
            logger.exception("the reader of the compute process failed")
            self._fail(f"the compute process cannot be read: {type(error).__name__}: {error}")
        self._group.wait()

    def _read(self) -> None:
        group = self._group
        try:
            ready = wait([group.pipe, *group.watched], _WATCH_EVERY_S)
            fault = group.fault(ready)
            if fault is not None and not self._supervisor.closed:
                logger.error("compute process %s", fault, extra={"action": "rank_lost"})
                group.kill(fault)
            if group.pipe in ready:
                for message in messages.decode_from_compute(group.pipe.recv_bytes()):
                    self._handle(message)
            elif self._is_stalled():
                logger.error("compute process stalled: ended", extra={"action": "stalled"})
                group.kill(self._stalled())
        except (EOFError, ConnectionError):
            self._replace()

    def _handle(self, message: messages.FromCompute) -> None:
        self._alive_at = time.monotonic()
        match message:
            # First: nearly all messages are answers.
            case messages.Generated() | messages.Ranked() | messages.Failed():
                with self._pending_lock:
                    flight = self._pending.pop(message.ticket, None)
                    if flight is not None:
                        flight.end(message.ticket, message)
            case messages.Ready():
                self.totals.note(message)
                self._supervisor.succeeded()
                self._precision = message.dtype
                self._ready.set()
            case messages.LoadFailed():
                self._fail(message.message)
            case messages.Stepped():
                self.totals.note(message)
                with self._pending_lock:
                    self._shares.stepped(message.steps, message.busy_s)
            case messages.Statistics():
                self.totals.note(message)

    def _vectors_in_flight(self) -> set[str]:
        with self._pending_lock:
            flights = set(self._pending.values())
        return {key for flight in flights for key in flight.vectors}

    def _is_stalled(self) -> bool:
        silent_s = time.monotonic() - self._alive_at
        if not self._ready.is_set():
            return silent_s > self._config.load_timeout_s
        return bool(self._pending) and silent_s > self._config.stalled_after_s

    def _replace(self) -> None:
        """Fail the flights of a process that has ended, and start another process."""
        self._group.wait()
        if self._supervisor.closed:
            return
        ending = f"the compute process {self._group.ending()}"
        if self._ready.is_set():
            lost: LauncherError = ComputeLostError(ending)
        else:
            lost = ComputeNotReadyError(f"{ending} while it loaded the model")
            if self._supervisor.failed():
                self._fail(f"{lost}, {self._supervisor.failures} times in a row")
                return
        logger.error("%s", lost, extra={"action": "lost"})
        with self._send_lock:
            self._ready.clear()
            self._fail_pending(lost)
            self._group.pipe.close()
            self._shares = EngineShares()
            self._vectors.clear()
            self.totals.process_ended()
            try:
                self._group = self._spawn()
            except ClosedError:
                return

    def _stalled(self) -> str:
        """Return, as a verb, how a stalled process ended."""
        limit = self._config.stalled_after_s if self._ready.is_set() else None
        return "stalled" if limit is None else f"stalled: no step in {limit:g} s"

    def _fail(self, error: str) -> None:
        """Fail all flights, now and later: no compute process can be started."""
        logger.error("no compute process: %s", error, extra={"action": "compute_failed"})
        # First, because a sender may hold the lock while it waits for the process to read.
        self._group.kill(error)
        with self._send_lock:
            self._error = error
            self._fail_pending(LauncherError(error))
        self._ready.set()
        self._on_failure(error)

    def _fail_pending(self, error: LauncherError) -> None:
        with self._pending_lock:
            lost, self._pending = self._pending, {}
            for ticket, flight in lost.items():
                flight.lost = error
                flight.end(ticket, None)
