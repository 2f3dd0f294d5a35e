"""What the commands for a running deployment share: the client, watching a job, exit statuses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from nightjar.pipeline.front.cli.console import (
    EXIT_NO_ROW_SUCCEEDED,
    EXIT_ROWS_FAILED,
    EXIT_RUN,
    end_interrupted,
    fail,
    print_json,
    say,
)
from nightjar.pipeline.front.cli.stored import print_table

if TYPE_CHECKING:
    from nightjar.pipeline.client.blocking import Client, Job
    from nightjar.pipeline.client.records import JobStatus

DEFAULT_API = "http://127.0.0.1:8000"
_RETRIES = 3  # somebody waits at the terminal
ApiUrl = Annotated[
    str, typer.Option("--api", envvar="NIGHTJAR_API", help="Where `nightjar api` listens.")
]


@contextmanager
def connect(api_url: str) -> "Iterator[Client]":
    """Give a client; an error of the API ends the command."""
    from nightjar.pipeline.client.blocking import Client
    from nightjar.pipeline.client.errors import ClientError

    try:
        with Client(api_url, retries=_RETRIES) as client:
            yield client
    except ClientError as error:
        fail(str(error), EXIT_RUN)


def show_deployment(api_url: str, *, as_json: bool) -> None:
    """Print the state of each part and model; end with 1 where one does not work."""
    from nightjar.pipeline.client.operations import health

    with connect(api_url) as client:
        found = client.take(health(client.asking))
    told = {**found.get("parts", {})}
    told |= {f"model {name}": state for name, state in found.get("models", {}).items()}
    if as_json:
        print_json(found, as_json=True)
    else:
        rows = [{"part": name, "state": state} for name, state in told.items()]
        print_table(rows, ("part", "state"))
    if any(state not in ("ok", "unknown") for state in told.values()):
        raise typer.Exit(EXIT_RUN)


def tell_submitted(job: "Job", *, as_json: bool, shows: bool = True) -> "JobStatus":
    """Print a job that was submitted, and on standard error its first bad row."""
    from nightjar.pipeline.files.formats import failure_text

    status = job.submitted or job.status()
    if shows:
        print_json(status.raw, as_json=as_json)
    failed, total = status.counts.failed, status.counts.total
    first = job.first_failure() if failed else None
    if first is not None:
        how = "were rejected" if "rejected" in status.raw else "have failed"
        say(f"{failed} of {total} rows {how}; the first: {failure_text(first.raw)}")
    return status


def watched(job: "Job", *, as_json: bool) -> "JobStatus":
    """Wait for a job's end, and show how it goes on; Ctrl-C ends the command, not the job."""
    told: list[tuple[str, int]] = []

    def tell(found: "JobStatus") -> None:
        if [(found.state, found.ended)] != told:
            told[:] = [(found.state, found.ended)]
            print_json(found.raw, as_json=True)

    try:
        return job.wait(progress=tell if as_json else True)
    except KeyboardInterrupt:
        end_interrupted("stopped watching; the job goes on")


def exit_by_outcome(found: "JobStatus", *, watch: bool) -> None:
    """End the command with the status for a job: at its end, or just submitted."""
    counts = found.counts
    if watch and counts.completed < counts.total:
        raise typer.Exit(EXIT_ROWS_FAILED if counts.completed else EXIT_NO_ROW_SUCCEEDED)
    if counts.failed == counts.total:
        raise typer.Exit(EXIT_NO_ROW_SUCCEEDED)
