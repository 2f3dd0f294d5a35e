"""`nightjar purge`: deletes requests and results of jobs that are over, on the database itself."""

import sys
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nightjar.jobs.errors import AccountError, LifecycleError, PurgedJobError, UnknownJobError
from nightjar.jobs.purge_records import ExpendableJob, PurgeReport, PurgeScope
from nightjar.pipeline.front.cli.console import (
    EXIT_USAGE,
    AsJson,
    check_driver,
    errors,
    fail,
    print_json,
    read_settings,
    say,
)
from nightjar.pipeline.front.cli.spans import parse_span

if TYPE_CHECKING:
    from nightjar.jobs.store import Store

MOST_COUNTED = 10_000
_SHOWN = 20
_TOLD_EVERY_S = 1.0


def purge(
    older_than: Annotated[
        str | None,
        typer.Option(metavar="30d", help="Jobs that ended so long ago, whatever their retention."),
    ] = None,
    job: Annotated[str | None, typer.Option(help="Only this job, whatever its age.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only jobs of this tenant.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; no more.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete requests, results and files of jobs that are over; their counts stay.

    Without --older-than and --job: the jobs whose retention is over. A purge that was interrupted
    goes on when the command runs again, and in the sweeps of the planner.

    Exit status: 0 done, or there was nothing to do, 1 the database is away or nobody agreed, 2
    unusable arguments.

    Example: nightjar purge --older-than 30d --dry-run
    """
    from nightjar.pipeline.queue.opening import open_store

    settings = read_settings()
    check_driver(settings)
    age_s = None if older_than is None else parse_span(older_than).total_seconds()
    scope = PurgeScope(settings.keep_results_s, age_s, tenant, job, settings.purge_only_exported)
    with closing(open_store(settings)) as store:
        _check(store, scope)
        found = store.retention.expendable(scope, MOST_COUNTED)
        begun = len(store.purging.marked(scope))
        if dry_run or not (found or begun):
            _show(found, begun, as_json)
            return
        if not yes:
            _ask(found, begun)
        _tell(_run(store, scope), begun, as_json)


def _check(store: "Store", scope: PurgeScope) -> None:
    """End the command where there is no such tenant, or nothing of the job can be purged."""
    try:
        if scope.tenant is not None:
            store.accounts.tenant(scope.tenant)
        if scope.job_id is not None:
            store.retention.check(scope.job_id)
    except PurgedJobError as error:
        say(str(error))
        raise typer.Exit from None
    except (AccountError, LifecycleError, UnknownJobError) as error:
        fail(str(error), EXIT_USAGE)


def _run(store: "Store", scope: PurgeScope) -> PurgeReport:
    """Purge until nothing is left, and tell how far it is where a person looks on."""
    total, is_done = PurgeReport(), False
    while not is_done:
        step = store.retention.sweep(scope, _TOLD_EVERY_S)
        total = replace(total, jobs=total.jobs + step.jobs, rows=total.rows + step.rows)
        is_done = step.is_done
        if errors.is_terminal and not is_done:
            say(f"{total.rows} rows so far")
    return total


def _ask(found: list[ExpendableJob], begun: int) -> None:
    _list(found, begun, err=True)
    if not sys.stdin.isatty():
        fail("standard input is no terminal to ask at; add --yes, or --dry-run", EXIT_USAGE)
    typer.confirm("Delete their requests, results and files?", abort=True, err=True)


def _show(found: list[ExpendableJob], begun: int, as_json: bool) -> None:
    if as_json:
        jobs = [_payload(one) for one in found[:_SHOWN]]
        counts = _counts(len(found), sum(one.rows for one in found), begun, True)
        print_json({**counts, "first": jobs}, as_json=True)
    else:
        _list(found, begun, err=False)


def _tell(report: PurgeReport, begun: int, as_json: bool) -> None:
    if as_json:
        print_json(_counts(report.jobs, report.rows, begun, False), as_json=True)
    else:
        typer.echo(f"purged {report.jobs} jobs; {report.rows} rows were deleted")


def _list(found: list[ExpendableJob], begun: int, *, err: bool) -> None:
    for one in found[:_SHOWN]:
        ended = one.finished_at.isoformat(timespec="seconds")
        typer.echo(f"{one.id}  {one.tenant}  ended {ended}  {one.rows} rows", err=err)
    if len(found) > _SHOWN:
        typer.echo(f"and {len(found) - _SHOWN} more", err=err)
    count = f"{len(found)} jobs" if len(found) < MOST_COUNTED else f"{MOST_COUNTED} jobs or more"
    rows = sum(one.rows for one in found)
    typer.echo(f"to purge: {count} with {rows} rows; {begun} purges go on", err=err)


def _counts(jobs: int, rows: int, begun: int, dry_run: bool) -> dict[str, Any]:
    return {"dry_run": dry_run, "jobs": jobs, "rows": rows, "begun_before": begun}


def _payload(one: ExpendableJob) -> dict[str, Any]:
    return {
        "id": one.id,
        "tenant": one.tenant,
        "finished_at": one.finished_at.isoformat(timespec="seconds"),
        "rows": one.rows,
    }
