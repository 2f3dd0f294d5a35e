"""What the API says of jobs and results, as JSON; `schemas.py` has the types."""

from datetime import UTC, datetime

from nightjar.jobs.api.schemas import JobPayload, ResultsPage
from nightjar.jobs.lines.batch_lines import output_line
from nightjar.jobs.records import Job, ResultPage


def job_payload(job: Job) -> JobPayload:
    """A job; moments are seconds since 1970."""
    return {
        "id": job.id,
        "object": "job",
        "state": job.state,
        "model": job.model,
        "priority": job.priority,
        "counts": {
            "total": job.total,
            "completed": job.completed,
            "failed": job.failed,
            "cancelled": job.cancelled,
            "reused": job.reused,
        },
        "usage": {
            "prompt_tokens": job.prompt_tokens,
            "requested_tokens": job.requested_tokens,
            "generated_tokens": job.completion_tokens,
            "saved_tokens": job.saved_tokens,
            "reused_tokens": job.reused_tokens,
        },
        "requests_per_second": _rate(job),
        "created_at": seconds(job.created_at),
        "started_at": seconds_or_none(job.started_at),
        "finished_at": seconds_or_none(job.finished_at),
        "expires_at": seconds_or_none(job.expires_at),
        "keep_results_s": job.keep_results_s,
        "purged_at": seconds_or_none(job.purged_at),
        "open": job.takes_rows,
        "cancel_requested": job.cancel_requested and not job.expired,
        "metadata": dict(job.metadata),
    }


def results_payload(page: ResultPage) -> ResultsPage:
    """A page of output lines, and how a client asks on."""
    return {
        "object": "list",
        "data": [output_line(record) for record in page.records],
        "has_more": page.has_more,
        "next_after": page.next_after,
        "complete": page.complete,
        "waits_for_row": page.waits_for_row,
    }


def seconds(moment: datetime) -> float:
    """A moment as seconds since 1970."""
    return round(moment.timestamp(), 3)


def seconds_or_none(moment: datetime | None) -> float | None:
    """The same; None for none."""
    return None if moment is None else seconds(moment)


def _rate(job: Job) -> float | None:
    """Finished requests a second since the first claim."""
    if job.started_at is None:
        return None
    elapsed_s = ((job.finished_at or datetime.now(UTC)) - job.started_at).total_seconds()
    return round(job.ended / elapsed_s, 3) if elapsed_s > 0 else None
