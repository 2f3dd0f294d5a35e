"""What must hold whatever was killed: every request ends, once, with the undisturbed answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from nightjar.jobs.records import ResultRecord
from nightjar.jobs.store import Store
from nightjar.jobs.store.tables import micro_batch, request, result
from tests.faults.system import System

Answers = Mapping[str, Any]  # what was said, by custom_id


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of the requests of all jobs of a system."""

    requests: int
    lost: int  # without an outcome
    twice: int  # with more than one
    wrong: int  # answered otherwise than in an undisturbed run, or failed
    recomputed: int  # given to a worker again after an earlier claim

    def check(self, recomputed_at_most: int) -> None:
        """Fail unless nothing is lost, twice or wrong, and little was computed again."""
        assert (self.lost, self.twice, self.wrong) == (0, 0, 0), self
        assert self.recomputed <= recomputed_at_most, (self, recomputed_at_most)


def told(record: ResultRecord) -> Any:
    """What an outcome says, without what tells jobs apart."""
    if record.body is None:
        return ("failed", record.error and (record.error.code, record.error.message))
    answer = record.body["results"] if "results" in record.body else record.body["choices"]
    return (answer, record.body["usage"])


def answers(store: Store, job_id: str) -> dict[str, Any]:
    """What a job's outcomes say, by custom_id."""
    return {str(record.custom_id): told(record) for record in store.results.iterate(job_id)}


def judge(system: System, undisturbed: Answers) -> Verdict:
    """Look at every request of every job; the jobs should be over."""
    lost = twice = wrong = total = 0
    for job_id in system.jobs:
        job = system.store.jobs.get(job_id)
        records = list(system.store.results.iterate(job_id))
        found = {str(record.custom_id): told(record) for record in records}
        total += job.total
        lost += job.total - len(found)
        # Delivered twice, or counted twice: the counters are moved apart from the rows.
        twice += len(records) - len(found) + max(0, job.ended - job.total)
        wrong += sum(answer != undisturbed[custom_id] for custom_id, answer in found.items())
        if job.is_over:
            counted = (job.completed, job.failed, job.cancelled)
            said = [record.error is None for record in records]
            assert counted == (said.count(True), said.count(False), 0), (counted, job)
    return Verdict(total, lost, twice, wrong, recomputed(system))


def recomputed(system: System) -> int:
    """How many requests were claimed once more than their first time.

    Every claim of a micro-batch counts as computing all of its requests; what was planned anew
    out of a crash (a suspect's part) is claimed from 0 on again.
    """
    row = micro_batch.c
    ours = row.job_id.in_(system.jobs)
    claimed = sa.select(sa.func.coalesce(sa.func.sum(row.attempts * row.size), 0)).where(ours)
    # A rejected row never was in a micro-batch; one that waits, or was cancelled in time, has never
    # been claimed. Who is isolated has been, before.
    ended = request.join(result, result.c.request_id == request.c.id)
    once = (
        sa.select(sa.func.count())
        .select_from(ended.join(micro_batch, row.id == request.c.micro_batch_id))
        .where(request.c.job_id.in_(system.jobs), sa.or_(row.attempts > 0, row.isolated))
    )
    with system.store.database.reading() as connection:
        return int(connection.scalar(claimed)) - int(connection.scalar(once) or 0)


def most_in_flight(system: System, *, workers: int = 1) -> int:
    """So many requests may be in flight at once: what each loss of a worker may cost."""
    threads = int(system.environment["NIGHTJAR_WORKER_THREADS"])
    return workers * threads * int(system.environment["NIGHTJAR_MICRO_BATCH_REQUESTS"])
