"""Jobs and micro-batches for reports, at moments that a test can add up by hand."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from nightjar.jobs.job_report import FailureGroups, JobReport, ReportedMicroBatch
from nightjar.jobs.records import Job
from nightjar.jobs.report_builder import ReportBuilder
from nightjar.jobs.states import JobState, MicroBatchState, RequestKind
from nightjar.jobs.tallies import Tally, bin_of

BEGIN = datetime(2026, 11, 23, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


def job(**changes: object) -> Job:
    made = Job(
        id="job_1",
        state=JobState.COMPLETED_WITH_FAILURES,
        model="tiny",
        total=30,
        completed=28,
        failed=2,
        cancelled=0,
        cancel_requested=False,
        expired=False,
        prompt_tokens=300,
        completion_tokens=100,
        requested_tokens=200,
        saved_tokens=100,
        metadata={},
        created_at=BEGIN,
        started_at=at(20),
        finished_at=at(120),
        expires_at=None,
        priority=0,
        reused=0,
        reused_tokens=0,
        tenant="default",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def micro_batch(rows: int, begin: float, end: float, **changes: object) -> ReportedMicroBatch:
    made = ReportedMicroBatch(
        kind=RequestKind.GENERATE,
        bucket=32,
        size=rows,
        state=MicroBatchState.DONE,
        epoch=0,
        attempts=1,
        crashes=0,
        worker_deaths=0,
        isolated=False,
        fingerprint="f" * 64,
        planned_at=at(10),
        leased_at=at(begin),
        ended_at=at(end),
        tally=Tally(rows=rows, prompt_tokens=10 * rows, prompts={bin_of(10): rows}),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def built(*micro_batches: ReportedMicroBatch, of: Job | None = None) -> JobReport:
    builder = ReportBuilder(of or job(), at(200), retried=1)
    for one in micro_batches:
        builder.add(one)
    return builder.built(FailureGroups([], 0, complete=True), complete=True)
