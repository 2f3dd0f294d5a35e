"""PgBouncer in transaction mode before PostgreSQL: whole jobs pass through two sessions."""

from functools import partial
from pathlib import Path

import pytest

from nightjar.jobs.states import JobState
from nightjar.jobs.store import Store
from tests.jobs import submit_for
from tests.model_deployment import FAKE, running
from tests.poolers import pooled
from tests.processes import wait_until

ROWS = 60
SMALL = FAKE | {"NIGHTJAR_MICRO_BATCH_REQUESTS": "4", "NIGHTJAR_HEARTBEAT_S": "0.1"}


def is_over(store: Store, job_id: str) -> bool:
    return store.jobs.get(job_id).is_over


@pytest.mark.slow
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_jobs_are_computed_through_a_pooler(
    store: Store, database_url: str, tiny_model: Path
) -> None:
    with pooled(database_url, sessions=2) as through, running(through) as deployment:
        direct = {"NIGHTJAR_DATABASE_DIRECT_URL": database_url}
        deployment.planner(tiny_model, **SMALL, **direct)
        deployment.worker(tiny_model, **SMALL)
        submitter = Store(through, direct_url=database_url)
        jobs = [submit_for(submitter, "default", ROWS) for _ in range(2)]
        for job_id in jobs:
            wait_until("the job", partial(is_over, submitter, job_id))
            assert submitter.jobs.get(job_id).state is JobState.COMPLETED
            assert len(submitter.results.read(job_id)) == ROWS
        submitter.close()
