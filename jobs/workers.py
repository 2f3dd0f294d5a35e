"""The records of processes: their signs of life, their seconds, who leads, who crashed."""

from dataclasses import dataclass
from datetime import datetime

from nightjar.jobs.records import JsonObject


@dataclass(frozen=True, slots=True)
class Crash:
    """The death of a compute process, or of a whole worker, held against what was in flight.

    `allowed`: so many of its kind, of a request that was computed alone, make it fail.
    `of_worker`: the worker went too, and nobody saw why. Who is killed from outside while it
    computes a lone suspect is no witness against it, so these are counted apart, and more allowed.
    """

    reason: str  # a clause with a verb, such as "the compute process was ended by SIGSEGV"
    allowed: int
    of_worker: bool = False


@dataclass(frozen=True, slots=True)
class ComputeSeconds:
    """Where the time of compute processes went; seconds of their own monotonic clocks."""

    engine_s: float = 0.0  # in steps of the engine
    load_s: float = 0.0  # in loading the model, once for each process that was started

    def __sub__(self, earlier: "ComputeSeconds") -> "ComputeSeconds":
        """What has come since `earlier`."""
        return ComputeSeconds(self.engine_s - earlier.engine_s, self.load_s - earlier.load_s)


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads under a name; a counter that stands still for an observer means a dead leader."""

    name: str
    owner: str | None  # None: it has resigned
    epoch: int  # raised whenever the lead changes hands
    counter: int
    protocol: int = 0  # what it can do; 0 for a leader of a version that did not say


@dataclass(frozen=True, slots=True)
class WorkerHeartbeat:
    """A worker's counter; a counter that stands still for the sweeper means a dead worker."""

    owner: str
    counter: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a GPU worker said of itself with its last heartbeat; for people.

    status: `gpu_worker/worker/status.py` lists the fields.
    """

    owner: str
    seen_at: datetime
    status: JsonObject
