"""`nightjar bill`: what the newest jobs of a tenant or a schedule cost, and their sum."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nightjar.pipeline.front.cli.console import AsJson, print_json, read_settings, say
from nightjar.pipeline.front.cli.stored import opened_store, print_table
from nightjar.visible import visible

if TYPE_CHECKING:
    from nightjar.jobs.store import Store

# The columns of the table, and the fields of a report's bill that they show.
_SHOWN = {
    "rows": "rows_computed",
    "prefilled": "prefilled_tokens",
    "cached": "cached_tokens",
    "decoded": "decoded_tokens",
    "stops saved": "saved_by_stops_tokens",
    "pruning saved": "saved_by_pruning_tokens",
    "padding avoided": "padding_avoided_tokens",
    "device s": "engine_s",
}
_MOST_MICRO_BATCHES = 20_000  # that are read of a job


def bill(
    tenant: Annotated[str, typer.Option(help="Whose jobs.")] = "default",
    schedule: Annotated[
        str | None, typer.Option(help="Only the jobs of this schedule's runs.")
    ] = None,
    last: Annotated[int, typer.Option(min=1, max=1000, help="So many jobs or runs.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Show what the newest jobs of a tenant, or of a schedule, cost: tokens and device seconds.

    It reads the database of NIGHTJAR_DATABASE_URL. A purged job costs nothing here any more.

    Exit status: 0 it was shown, 1 the database does not answer, 2 unusable arguments.

    Example: nightjar bill --tenant owls --schedule rank --last 7
    """
    with opened_store(read_settings()) as store:
        jobs = [_of_job(store, job_id) for job_id in _jobs(store, tenant, schedule, last)]
    total = {name: round(sum(one[name] for one in jobs), 3) for name in _SHOWN.values()}
    if as_json:
        print_json(
            {"tenant": tenant, "schedule": schedule, "jobs": jobs, "total": total}, as_json=True
        )
        return
    for one in jobs:
        if not one["complete"]:
            say(f"{one['job']}: only its first {_MOST_MICRO_BATCHES:,} micro-batches are counted")
    rows = [_row(visible(one["job"]), one) for one in jobs]
    print_table([*rows, _row(f"{len(jobs)} jobs", total)], ["job", *_SHOWN])


def _jobs(store: "Store", tenant: str, schedule: str | None, last: int) -> Iterator[str]:
    """Ids, the newest first."""
    if schedule is None:
        yield from (job.id for job in store.jobs.newest(last, tenant=tenant))
        return
    found = store.schedules.find(tenant, schedule)
    for run in store.schedule_runs.newest(found.id, last):
        if run.job_id is not None:
            yield run.job_id


def _of_job(store: "Store", job_id: str) -> dict[str, Any]:
    report = store.reports.of_job(job_id, _MOST_MICRO_BATCHES)
    costs = report.as_json()["bill"]
    return {"job": job_id, "complete": report.complete} | {
        name: costs[name] for name in _SHOWN.values()
    }


def _row(name: str, costs: dict[str, Any]) -> dict[str, str]:
    return {"job": name} | {
        column: f"{costs[field]:,.1f}" if field == "engine_s" else f"{costs[field]:,}"
        for column, field in _SHOWN.items()
    }
