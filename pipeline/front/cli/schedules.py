"""Commands for schedules; they work on the database itself."""

import getpass
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nightjar.jobs.records import DEFAULT_TENANT
from nightjar.pipeline.front.cli.console import (
    EXIT_ROWS_FAILED,
    EXIT_USAGE,
    AsJson,
    fail,
    print_json,
    read_settings,
    say,
)
from nightjar.pipeline.front.cli.schedule_rows import listed_row, run_row, schedule_row
from nightjar.pipeline.front.cli.stored import opened_store, print_table, shown

if TYPE_CHECKING:
    from nightjar.jobs.schedules.steering import Steering
    from nightjar.jobs.store import Store

schedules = typer.Typer(
    name="schedules",
    help="Nightly runs: apply a schedule file, list, pause and run schedules.",
    no_args_is_help=True,
)

EXIT_FAILING = EXIT_ROWS_FAILED
Tenant = Annotated[str, typer.Option(help="Whose schedules they are.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name, or its id.")]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="How many, the newest.")]


@schedules.command()
def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A schedule file (.toml, .yaml).")],
    tenant: Tenant = DEFAULT_TENANT,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Delete schedules that this file named before and does not."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make or change the schedules of a file; what is the same already stays as it is.

    Exit status: 0 applied, 1 the database is away, 2 the file cannot be used.

    Example: nightjar schedules apply schedules.toml
    """
    from nightjar.pipeline.schedules.applying import apply_file
    from nightjar.pipeline.schedules.schedule_file import ScheduleFileError, read_schedules

    try:
        read = read_schedules(file)
    except ScheduleFileError as error:
        fail(str(error), EXIT_USAGE)
    with _opened(tenant) as store:
        report = apply_file(store, read, tenant, _actor(), prune=prune)
    rows = [
        {"name": one.name, "change": one.change, "next_at": shown(one.next_at)} for one in report
    ]
    if as_json:
        print_json(rows, as_json=True)
        return
    print_table(rows, ("name", "change", "next_at"))
    if left := [one.name for one in report if one.change == "left"]:
        say(f"no longer in the file, and still there: {', '.join(left)}; --prune deletes them")


@schedules.command("list")
def list_schedules(tenant: Tenant = DEFAULT_TENANT, as_json: AsJson = False) -> None:
    """List the schedules of a tenant, with their next and last runs.

    Example: nightjar schedules list --tenant owls
    """
    from nightjar.jobs.schedules.checking import each_schedule

    with _opened(tenant) as store:
        rows = [listed_row(one) for one in each_schedule(store, tenant)]
    if as_json:
        print_json(rows, as_json=True)
        return
    for row in rows:
        row["next_at"] = "paused" if row["paused"] else row["next_at"]
    columns = ("name", "cron", "time_zone", "next_at", "last_planned_at", "last_state", "failures")
    print_table(rows, columns)


@schedules.command()
def show(name: Name, tenant: Tenant = DEFAULT_TENANT, as_json: AsJson = False) -> None:
    """Show a schedule, with its newest run.

    Example: nightjar schedules show nightly-rank
    """
    with _opened(tenant) as store:
        found = store.schedules.find(tenant, name)
        last = store.schedule_runs.newest(found.id, 1)
    told = schedule_row(found) | {"last_run": run_row(last[0]) if last else None}
    print_json(told, as_json=as_json)


@schedules.command()
def pause(name: Name, tenant: Tenant = DEFAULT_TENANT, as_json: AsJson = False) -> None:
    """Make no more runs; one that has begun goes on.

    Example: nightjar schedules pause nightly-rank
    """
    with _steered(tenant) as steering:
        print_json(schedule_row(steering.pause(name)), as_json=as_json)


@schedules.command()
def resume(name: Name, tenant: Tenant = DEFAULT_TENANT, as_json: AsJson = False) -> None:
    """Let a paused schedule run again, from its next time on.

    Example: nightjar schedules resume nightly-rank
    """
    with _steered(tenant) as steering:
        print_json(schedule_row(steering.resume(name)), as_json=as_json)


@schedules.command("run-now")
def run_now(name: Name, tenant: Tenant = DEFAULT_TENANT, as_json: AsJson = False) -> None:
    """Make a run that begins at once, also of a paused schedule; its next time stays.

    Exit status: 0 the run was made, 1 the database is away, 2 there is no such schedule, or an
    earlier run goes on.

    Example: nightjar schedules run-now nightly-rank
    """
    with _steered(tenant) as steering:
        print_json(run_row(steering.run_now(name)), as_json=as_json)


@schedules.command()
def history(
    name: Name, tenant: Tenant = DEFAULT_TENANT, limit: Limit = 20, as_json: AsJson = False
) -> None:
    """List the runs of a schedule, newest first.

    Example: nightjar schedules history nightly-rank --limit 30
    """
    with _opened(tenant) as store:
        found = store.schedules.find(tenant, name)
        rows = [run_row(one) for one in store.schedule_runs.newest(found.id, limit)]
    if as_json:
        print_json(rows, as_json=True)
        return
    columns = ("planned_at", "trigger", "state", "ended_at", "completed", "failed", "job_id")
    print_table(rows, (*columns, "reason"))


@schedules.command()
def changes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One schedule alone.")] = None,
    tenant: Tenant = DEFAULT_TENANT,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List who changed which schedule, when and what; also of deleted ones.

    Example: nightjar schedules changes nightly-rank
    """
    with _opened(tenant) as store:
        one = None if name is None else store.schedules.find(tenant, name).id
        found = store.schedules.changes(tenant, limit, schedule_id=one)
    rows: list[dict[str, Any]] = [
        {
            "at": shown(change.at),
            "actor": change.actor,
            "name": change.name,
            "action": change.action.value,
            "before": dict(change.before),
            "after": dict(change.after),
        }
        for change in found
    ]
    if as_json:
        print_json(rows, as_json=True)
        return
    for row in rows:
        row |= {name: json.dumps(row[name], ensure_ascii=False) for name in ("before", "after")}
    print_table(rows, ("at", "actor", "name", "action", "before", "after"))


@schedules.command()
def check(
    tenant: Annotated[str | None, typer.Option(help="One tenant alone.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell whether a schedule has failed three times running, or does not run at all.

    Exit status: 0 all is well, 1 the database is away, 2 unusable arguments, 3 a schedule is
    failing or stands still.

    Example: nightjar schedules check --json
    """
    from nightjar.jobs.schedules.checking import troubles

    with _opened(tenant) as store:
        found = [
            {"tenant": one.schedule.tenant, "name": one.schedule.name, "trouble": one.told}
            for one in troubles(store, tenant)
        ]
    if as_json:
        print_json(found, as_json=True)
    elif found:
        print_table(found, ("tenant", "name", "trouble"))
    else:
        typer.echo("ok")
    if found:
        raise typer.Exit(EXIT_FAILING)


@schedules.command()
def delete(name: Name, tenant: Tenant = DEFAULT_TENANT, as_json: AsJson = False) -> None:
    """Delete a schedule with its history, and cancel what it runs.

    Example: nightjar schedules delete nightly-rank
    """
    with _steered(tenant) as steering:
        found = steering.delete(name)
    print_json({"id": found.id, "name": found.name, "deleted": True}, as_json=as_json)


@schedules.command()
def schema() -> None:
    """Print the JSON schema of schedule files, for editors.

    Example: nightjar schedules schema > schedules.schema.json
    """
    from nightjar.pipeline.schedules.schedule_file import json_schema

    typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


@contextmanager
def _opened(tenant: str | None) -> "Iterator[Store]":
    """Open the database; a tenant that is not there ends the command."""
    with opened_store(read_settings()) as store:
        if tenant is not None:
            store.accounts.tenant(tenant)
        yield store


@contextmanager
def _steered(tenant: str) -> "Iterator[Steering]":
    """Open the database to change a tenant's schedules, as the user of this command."""
    from nightjar.jobs.schedules.steering import Steering

    with _opened(tenant) as store:
        yield Steering(store, tenant, _actor())


def _actor() -> str:
    """Who runs the command, as the operating system knows them."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name
        user = "?"
    return f"{user}@{socket.gethostname()}"
