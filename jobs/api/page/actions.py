"""What can be done with a job: the words of the question and of the answer, and the act."""

from collections.abc import Callable
from dataclasses import dataclass

from nightjar.jobs.api.page.views import JobView
from nightjar.jobs.errors import LifecycleError
from nightjar.jobs.store import Store


@dataclass(frozen=True, slots=True)
class Action:
    """The words of an action.

    Attributes:
        verb: On its button.
        past: In a sentence about the job.
        question: Before it is done.
        done: After it was done.
        is_final: Whether it cannot be undone.
    """

    verb: str
    past: str
    question: str
    done: str
    is_final: bool = False


ACTIONS = {
    "pause": Action(
        "Pause",
        "paused",
        "Micro-batches that are being computed finish. Nothing else begins until you resume it.",
        "The job is paused.",
    ),
    "resume": Action(
        "Resume", "resumed", "The rows that are left are computed.", "The job goes on."
    ),
    "retry": Action(
        "Retry failures",
        "retried",
        "Rows that failed through no fault of the request are computed again.",
        "What failed through no fault of the request is queued again.",
    ),
    "cancel": Action(
        "Cancel",
        "cancelled",
        "Rows without an outcome are not computed. What has landed stays. "
        "A cancelled job cannot be resumed.",
        "The job is being cancelled.",
        is_final=True,
    ),
}


NOTICES = {name: action.done for name, action in ACTIONS.items()} | {
    "nothing": "Nothing was retried: every failure is the request's own fault."
}


class Act:
    """Does it. `wake` tells the planner of a job that has work again."""

    def __init__(self, store: Store, wake: Callable[[str], str | None]) -> None:
        self._store = store
        self._wake = wake

    def __call__(self, job_id: str, action: str) -> str:
        """What the notice is called; LifecycleError where the job's state does not allow it."""
        check_possible(JobView(self._store.jobs.get(job_id)), action)
        stopping = self._store.stopping
        if action == "pause":
            stopping.pause(job_id)
        elif action == "cancel":
            stopping.cancel(job_id)
        elif action == "resume":
            stopping.resume(job_id)
            self._wake(job_id)
        elif self._store.retries.retry(job_id):
            self._wake(job_id)
        else:
            return "nothing"
        return action


def check_possible(view: JobView, action: str) -> None:
    """Raise LifecycleError for what cannot be done with the job as it stands."""
    if action not in view.actions:
        raise LifecycleError(
            f"the job is {view.job.state.value}: it cannot be {ACTIONS[action].past} now"
        )
