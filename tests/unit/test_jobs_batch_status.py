"""What a batch is called: one function of its stage, its job and a cancel."""

import pytest

from nightjar.jobs.batch_records import batch_id_of, job_id_of
from nightjar.jobs.errors import LifecycleError
from nightjar.jobs.lifecycle import BATCH_ENDS, BATCH_TRANSITIONS, JOB_TRANSITIONS, batch_status
from nightjar.jobs.states import BatchStage, BatchStatus, JobState

V, L, F = BatchStage.VALIDATING, BatchStage.LANDED, BatchStage.FINAL
TABLE: list[tuple[BatchStage, JobState | None, bool, str]] = [
    (V, None, False, "validating"),
    (V, None, True, "cancelling"),
    (BatchStage.FAILED, None, False, "failed"),
    (BatchStage.FAILED, None, True, "failed"),
    (BatchStage.CANCELLED, None, True, "cancelled"),
    (L, JobState.QUEUED, False, "in_progress"),
    (L, JobState.RUNNING, False, "in_progress"),
    (L, JobState.PAUSED, False, "in_progress"),
    (L, JobState.CANCELLING, True, "cancelling"),
    (L, JobState.CANCELLING, False, "in_progress"),  # by its deadline
    (L, JobState.COMPLETED, False, "finalizing"),
    (L, JobState.COMPLETED_WITH_FAILURES, False, "finalizing"),
    (L, JobState.FAILED, False, "finalizing"),
    (L, JobState.EXPIRED, False, "finalizing"),
    (L, JobState.CANCELLED, True, "cancelling"),
    (F, JobState.COMPLETED, False, "completed"),
    (F, JobState.COMPLETED_WITH_FAILURES, False, "completed"),
    (F, JobState.FAILED, False, "completed"),  # every row failed
    (F, JobState.EXPIRED, False, "expired"),
    (F, JobState.CANCELLED, True, "cancelled"),
]


@pytest.mark.parametrize(("stage", "job", "cancelling", "status"), TABLE)
def test_the_status(stage: BatchStage, job: JobState | None, cancelling: bool, status: str) -> None:
    assert batch_status(stage, job, cancelling=cancelling) is BatchStatus(status)


def test_the_table_names_every_stage_every_job_state_and_every_status() -> None:
    assert {stage for stage, *_ in TABLE} == set(BatchStage) == set(BATCH_TRANSITIONS)
    assert {job for stage, job, *_ in TABLE if stage is L} == set(JobState)
    assert {status for *_, status in TABLE} == {status.value for status in BatchStatus}


def test_what_ends_a_job_ends_its_batch() -> None:
    retried = {JobState.COMPLETED_WITH_FAILURES, JobState.FAILED}  # the store refuses it
    assert {job for job, after in JOB_TRANSITIONS.items() if not after} | retried == set(BATCH_ENDS)


def test_a_batch_with_rows_has_a_job() -> None:
    with pytest.raises(LifecycleError, match="'landed' has a job"):
        batch_status(L, None, cancelling=False)


def test_a_batch_and_its_job_have_one_id() -> None:
    assert batch_id_of("job_12") == "batch_12"
    assert job_id_of("batch_12") == "job_12"
    assert job_id_of("job_12") is None
