"""Reports what a run's job waits for while it makes no progress."""

import time
from collections.abc import Callable

from nightjar.jobs.records import Job
from nightjar.jobs.store.jobs import Jobs
from nightjar.jobs.store.waiting import Waiting, WaitsFor

_PATIENCE_S = 10.0
_OWN = {WaitsFor.GPU_WORKER: "GPU worker", WaitsFor.PLANNER: "planner"}


class Patience:
    """Reports why a job makes no progress, each reason once."""

    def __init__(self, jobs: Jobs, say: Callable[[str], None]) -> None:
        self._jobs = jobs
        self._say = say
        self._ended = -1
        self._check_at = 0.0
        self._said: tuple[WaitsFor, ...] | None = None

    def check(self, job: Job) -> None:
        """Check whether the job has made progress; if not, report what it waits for."""
        now = time.monotonic()
        if job.ended != self._ended:
            self._ended, self._check_at, self._said = job.ended, now + _PATIENCE_S, None
        elif now >= self._check_at:
            self._check_at = now + _PATIENCE_S
            waiting = self._jobs.waiting_for(job.id)
            if waiting.message is not None and waiting.waits_for != self._said:
                self._said = waiting.waits_for
                self._say(f"waits: {_for_a_run(waiting)}")


def _for_a_run(waiting: Waiting) -> str | None:
    """Return what a run waits for; the processes of a deployment are its own here."""
    if set(waiting.waits_for) <= _OWN.keys():
        named = " and the ".join(_OWN[one] for one in waiting.waits_for)
        return f"the {named} of this run: starting, or loading the model"
    return waiting.message
