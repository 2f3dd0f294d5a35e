"""Commands for a running deployment: submit a job, show it, pause, resume or cancel it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nightjar.pipeline.front.cli.console import (
    EXIT_NO_ROW_SUCCEEDED,
    EXIT_RUN,
    EXIT_USAGE,
    Source,
    fail,
    say,
)

if TYPE_CHECKING:
    from nightjar.pipeline.front.client import Client

DEFAULT_API = "http://127.0.0.1:8000"
ApiUrl = Annotated[
    str, typer.Option("--api", envvar="NIGHTJAR_API", help="Where `nightjar api` listens.")
]


class Outcome(StrEnum):
    """Which results to show."""

    ALL = "all"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


def submit(  # noqa: PLR0913, PLR0917 - its options
    source: Source,
    api_url: ApiUrl = DEFAULT_API,
    key: Annotated[
        str | None, typer.Option(help="Idempotency key: the same key sent twice makes one job.")
    ] = None,
    completion_window: Annotated[
        str | None, typer.Option(help="Such as 90m or 24h; what is not computed by then expires.")
    ] = None,
    priority: Annotated[
        int, typer.Option(min=0, max=9, help="Each step is worth an hour of waiting.")
    ] = 0,
    model: Annotated[
        str | None, typer.Option(help="The job's model (default: the one that its lines name).")
    ] = None,
    wait_for_model: Annotated[
        bool, typer.Option(help="Store the job though its model is unknown; it waits for it.")
    ] = False,
    keep_results: Annotated[
        str | None,
        typer.Option(metavar="7d", help="Purge its requests and results so long after its end."),
    ] = None,
) -> None:
    """Send a file to a running deployment, and print the job.

    Exit status: 0 the job was stored, 1 it was not, 2 unusable arguments, 4 every row was rejected.
    """
    from nightjar.pipeline.files.formats import UnusableInputError, check_format, failure_text

    if not source.is_file():
        fail(f"the input {source} is not a file", EXIT_USAGE)
    try:
        check_format(source)
    except UnusableInputError as error:
        fail(f"the input {source} {error}", EXIT_USAGE)
    except OSError as error:
        fail(f"the input {source}: {error.strerror}", EXIT_USAGE)
    with connect(api_url) as client:
        job = client.submit(
            source,
            key,
            completion_window,
            priority,
            model=model,
            wait_for_model=wait_for_model,
            keep_results=keep_results,
        )
        typer.echo(json.dumps(job, indent=2))
        failed, total = job["counts"]["failed"], job["counts"]["total"]
        first = client.first_failure(job["id"]) if failed else None
    if first is not None:
        how = "were rejected" if "rejected" in job else "have failed"
        told = f"{failed} of {total} rows {how}; the first: {failure_text(first)}"
        say(told)
    if failed == total:
        raise typer.Exit(EXIT_NO_ROW_SUCCEEDED)


def status(job_id: str, api_url: ApiUrl = DEFAULT_API) -> None:
    """Show a job's state and counts; what it waits for goes to standard error."""
    with connect(api_url) as client:
        job = client.job(job_id)
    typer.echo(json.dumps(job, indent=2))
    if job.get("waiting"):
        say(f"it waits: {job['waiting']}")


def results(
    job_id: str,
    api_url: ApiUrl = DEFAULT_API,
    outcome: Annotated[Outcome, typer.Option(help="Which rows.")] = Outcome.ALL,
) -> None:
    """Print the results of a job so far, as OpenAI batch output lines."""
    with connect(api_url) as client:
        for line in client.results(job_id, outcome.value):
            typer.echo(json.dumps(line, ensure_ascii=False))


def cancel(job_id: str, api_url: ApiUrl = DEFAULT_API) -> None:
    """Cancel a job; stored results stay."""
    _steer(api_url, lambda client: client.cancel(job_id))


def pause(job_id: str, api_url: ApiUrl = DEFAULT_API) -> None:
    """Pause a job: no more of it starts, and running micro-batches finish."""
    _steer(api_url, lambda client: client.pause(job_id))


def resume(job_id: str, api_url: ApiUrl = DEFAULT_API) -> None:
    """Continue a paused job."""
    _steer(api_url, lambda client: client.resume(job_id))


def retry(job_id: str, api_url: ApiUrl = DEFAULT_API) -> None:
    """Compute requests again whose failure they did not cause, such as a crash."""
    _steer(api_url, lambda client: client.retry(job_id))


def _steer(api_url: str, ask: "Callable[[Client], dict[str, Any]]") -> None:
    """Ask for a change of a job, and print the job that the API answers with."""
    with connect(api_url) as client:
        typer.echo(json.dumps(ask(client), indent=2))


@contextmanager
def connect(api_url: str) -> "Iterator[Client]":
    """Give a client; an error of the API ends the command."""
    from nightjar.pipeline.front.client import Client, ClientError

    try:
        with Client(api_url) as client:
            yield client
    except ClientError as error:
        fail(str(error), EXIT_RUN)
