"""No hot statement reads more because other jobs have more rows, or because many are over.

Each call of the store runs beside few rows and beside many, and PostgreSQL counts what it read.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TypeAlias

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.purge_records import PurgeScope
from nightjar.jobs.records import (
    ClaimedMicroBatch,
    EncodedRequest,
    MicroBatchRef,
    NewJob,
    NewMicroBatch,
    NewRequest,
    NewResult,
    RejectedRow,
)
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.store.depths import MOST_READY
from nightjar.jobs.store.submission import new_parted_job_id
from nightjar.jobs.workers import ComputeSeconds
from nightjar.pipeline.queue.sweeper import Sweeper
from tests.bulk_jobs import finished_job, old_jobs, running_job
from tests.jobs import planned, submit_for
from tests.outcomes import answers, claim
from tests.postgres_schemas import administering
from tests.query_costs import Cost, costs

# Whatever the sizes of the tables are.
MOST_ROWS = 200
MOST_PAGES = 400
KEPT_DAYS = 10
LARGE = 3_000
BACKLOG = (
    "DELETE FROM landing WHERE job_id = :job",
    "DELETE FROM result WHERE job_id = :job",
    "UPDATE request SET state = 'queued', micro_batch_id = NULL WHERE job_id = :job",
    "DELETE FROM micro_batch WHERE job_id = :job",
    "UPDATE job SET state = 'queued', completed = 0, landed = 0, planned_to = 0, "
    "finished_at = NULL WHERE id = :job",
)
Call: TypeAlias = tuple[str, Callable[[], object]]


class Calls:
    """The calls of the store that a deployment makes all the time, for a job of a few rows."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.sweeper = Sweeper(
            store,
            dead_after_s=60,
            redispatch_after_s=60,
            longest_gap_s=60,
            deaths_allowed=3,
            keep_results_s=KEPT_DAYS * 86_400,
        )

    def measure(self) -> dict[str, list[Cost]]:
        """What each call costs."""
        job_id, (ref, other, *_) = planned(self.store, 4, each=1)
        claim(self.store, other)  # somebody holds a lease
        waiting = submit_for(self.store, "default", 3)
        finished_job(self.store, 10, days=2 * KEPT_DAYS)  # a sweep purges it
        calls = (*self._reading(job_id, waiting), *self._writing(job_id, ref))
        return {name: self._cost(call) for name, call in calls}

    def _cost(self, call: Callable[[], object]) -> list[Cost]:
        with costs(self.store) as found:
            call()
        return found

    def _reading(self, job_id: str, waiting: str) -> Iterator[Call]:
        store = self.store
        yield "jobs to plan", store.backlog.jobs_to_plan
        yield "next to plan", store.backlog.next_to_plan
        yield "first of tenants", store.backlog.first_of_tenants
        yield "planning window", lambda: store.backlog.queued_requests(waiting, 100)
        yield "dispatchable", lambda: store.planning.dispatchable(16)
        yield "lease holders", store.heartbeats.of_lease_holders
        yield "leases held", lambda: store.leases.held_by("worker")
        yield "status", lambda: store.jobs.get(job_id)
        yield "page of jobs", lambda: store.jobs.newest(20)
        yield "metrics", store.depths.read

    def _writing(self, job_id: str, ref: MicroBatchRef) -> Iterator[Call]:
        store = self.store
        yield "heartbeat", lambda: store.heartbeats.beat("worker", ComputeSeconds())
        claimed: list[ClaimedMicroBatch] = []
        yield "claim", lambda: claimed.append(claim(store, ref))
        lease = (ref.id, ref.epoch, "worker")
        yield "finish", lambda: store.leases.finish(*lease, answers(claimed[0]))
        yield "page of results", lambda: store.results.read(job_id)
        yield "part of an export", lambda: list(store.results.iterate_raw(job_id, last=3))
        yield "charge", store.shares.settle
        yield "sweep", self.sweeper.sweep


def too_dear(found: dict[str, list[Cost]]) -> dict[str, list[Cost]]:
    """The statements that read more than they may."""
    most = {"metrics": 3 * MOST_READY}  # which it reads with the rows of their jobs
    dear = {
        name: [
            one for one in costs if one.rows > most.get(name, MOST_ROWS) or one.pages > MOST_PAGES
        ]
        for name, costs in found.items()
    }
    return {name: costs for name, costs in dear.items() if costs}


def grow(store: Store, rows: int) -> None:
    """Give the tables so many rows of jobs that are over, and as many of jobs that run or wait."""
    old_jobs(store, rows // 20)
    finished_job(store, rows, days=1)
    running_job(store, rows // 2)
    waiting = finished_job(store, rows // 2)
    with administering(store.database.url.render_as_string(False)) as admin:
        for statement in BACKLOG:
            admin.execute(sa.text(statement), {"job": waiting})
        admin.exec_driver_sql("VACUUM ANALYZE")


@pytest.fixture
def store(postgres_tables: str) -> Iterator[Store]:
    with closing(Store(postgres_tables)) as opened:
        yield opened


@pytest.fixture
def by_indexes(postgres_tables: str) -> Iterator[Store]:
    """A store whose tables look large to PostgreSQL: it reads them whole where no index helps."""
    url = make_url(postgres_tables)
    options = f"{url.query['options']} -cenable_seqscan=off"
    large = url.update_query_dict({"options": options}).render_as_string(False)
    with closing(Store(large)) as opened:
        yield opened


def test_no_statement_reads_more_in_large_tables(by_indexes: Store) -> None:
    grow(by_indexes, 20_000)
    assert too_dear(Calls(by_indexes).measure()) == {}


def test_a_worker_reads_its_own_leases_alone(by_indexes: Store) -> None:
    planned(by_indexes, 300, each=1)
    lease = "UPDATE micro_batch SET state = 'leased', owner = 'worker-' || id % 100"
    by_indexes.database.write(lambda connection: connection.execute(sa.text(lease)))
    with costs(by_indexes) as found:
        assert len(by_indexes.leases.held_by("worker-7")) == 3
        assert by_indexes.leases.give_back_all("worker-8") == 3
    assert [one.rows for one in found if "owner =" in one.statement] == [3, 3]


def large_job(store: Store) -> str:
    """The first job of its day: PostgreSQL has no statistics of its rows' partition.

    A third of the rows repeats a request, a third a custom_id, and the others are rejected.
    """
    equal, odd = (
        validate_body(RequestKind.GENERATE, {"prompt": text, "max_tokens": 4, "temperature": 0})
        for text in ("a", "b")
    )
    thirds = range(0, LARGE, 3)
    with store.jobs.submit(NewJob("tiny", id=new_parted_job_id(5 * 86_400))) as submission:
        for n in thirds:
            submission.add(
                [
                    NewRequest(n, n + 1, f"row-{n}", RequestKind.GENERATE, equal),
                    NewRequest(n + 1, n + 2, f"row-{n}", RequestKind.GENERATE, odd),
                    RejectedRow(n + 2, n + 3, f"row-{n + 2}", "invalid_json", "no JSON"),
                ]
            )
    return submission.job_id


def test_a_large_job_is_first_of_its_day(postgres_tables: str) -> None:
    """No statement compares all rows of a job with all."""
    with closing(Store(postgres_tables)) as store, costs(store) as found:
        job_id = large_job(store)
        queued = store.backlog.queued_requests(job_id, LARGE)
        ids = [request.id for request in queued]
        (ref,) = store.planning.save_plan(
            job_id,
            [EncodedRequest(id_, [[1]]) for id_ in ids],
            [NewMicroBatch(RequestKind.GENERATE, 32, ids, len(ids))],
        )
        claimed = claim(store, ref)
        failures = [
            NewResult.failure(one.id, "overloaded", "no memory", status=503)
            for one in claimed.requests
        ]
        store.leases.finish(ref.id, ref.epoch, "worker", failures)
        store.orphans.land()
        assert store.retries.retry(job_id) == LARGE // 3
        store.stopping.cancel(job_id)
        store.stopping.finish()
        store.orphans.land()
        assert len(list(store.results.iterate_raw(job_id))) == LARGE
        store.shares.settle()
        store.retention.sweep(PurgeScope(job_id=job_id))
    assert len(found) > 50
    assert [one for one in found if one.rows > 40 * LARGE] == []


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_no_statement_reads_more_in_tables_of_millions(store: Store) -> None:
    grow(store, 2_500_000)
    assert too_dear(Calls(store).measure()) == {}
