"""Requests in flight between the worker and its compute process, and what computing them took."""

import threading
from collections.abc import Collection, Sequence

from nightjar.gpu_worker.compute import messages


class LauncherError(Exception):
    """The compute process cannot serve."""


class ComputeLostError(LauncherError):
    """The compute process ended or stalled with requests in flight; the message says how."""


class ComputeNotReadyError(LauncherError):
    """The requests will not be computed here; they did not cause that."""


class InFlight:
    """Requests sent together, and their answers.

    There is one such object for a micro-batch, because a future for each request would be slow.

    vectors: The keys of the prompt vectors that they name.
    answers: By ticket; complete once `done` is set, unless the flight was cancelled or lost.
    lost: Why the missing answers will not come; None while they may.
    engine_s, steps: The flight's share of the engine's seconds and steps, see EngineShares.
    missing: Requests without an answer.
    """

    def __init__(self, tickets: Sequence[int], vectors: Collection[str] = ()) -> None:
        self.tickets = tickets
        self.vectors = vectors
        self.answers: dict[int, messages.Answer] = {}
        self.lost: LauncherError | None = None
        self.done = threading.Event()
        self.engine_s = 0.0
        self.steps = 0.0
        self.missing = len(tickets)
        if not tickets:
            self.done.set()

    def end(self, ticket: int, answer: messages.Answer | None) -> None:
        """Note that a request has ended, with or without its answer; not thread-safe."""
        if answer is not None:
            self.answers[ticket] = answer
        self.missing -= 1
        if not self.missing:
            self.done.set()


class EngineShares:
    """Divides the steps of one compute process among the flights, by their open requests.

    The shares add up to what the process has reported, as long as it had anything to compute. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._flights: set[InFlight] = set()
        self._steps = 0
        self._busy_s = 0.0

    def join(self, flight: InFlight) -> None:
        """Let a flight take its share from now on, until it is done."""
        if not flight.done.is_set():
            self._flights.add(flight)

    def stepped(self, steps: int, busy_s: float) -> None:
        """Divide what has come since the last report; both numbers are of the whole process."""
        more, more_s = steps - self._steps, busy_s - self._busy_s
        self._steps, self._busy_s = steps, busy_s
        self._flights = {flight for flight in self._flights if not flight.done.is_set()}
        total = sum(flight.missing for flight in self._flights)
        for flight in self._flights:
            share = flight.missing / total
            flight.steps += more * share
            flight.engine_s += more_s * share
