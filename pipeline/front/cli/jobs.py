"""Commands for a running deployment: submit a job, show it, pause, resume or cancel it."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nightjar.pipeline.front.cli.console import (
    EXIT_USAGE,
    AsJson,
    Input,
    fail,
    is_task_file,
    print_json,
    say,
)
from nightjar.pipeline.front.cli.deployment import (
    DEFAULT_API,
    ApiUrl,
    connect,
    exit_by_outcome,
    show_deployment,
    tell_submitted,
    watched,
)

if TYPE_CHECKING:
    from nightjar.pipeline.client.blocking import Job
    from nightjar.pipeline.client.options import SubmitOptions
    from nightjar.pipeline.client.records import JobStatus

JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id, which `submit` prints.")]


class Outcome(StrEnum):
    """Which results to show."""

    ALL = "all"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


def submit(  # noqa: PLR0913, PLR0917 - one for each option
    source: Input,
    api_url: ApiUrl = DEFAULT_API,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Wait for the job's end; of a task, also write the answers in its sink."
        ),
    ] = False,
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
    as_json: AsJson = False,
) -> None:
    """Send a file or the rows of a task to a running deployment, and print the job.

    A task whose answers are not written yet goes on with the job that it has: run it again with
    --watch.

    Exit status: 0 the job was stored, 1 it was not, 2 unusable arguments, 4 every row was rejected.
    With --watch: 0 every row succeeded, 3 some rows failed, 4 no row succeeded, 1 the answers could
    not be written.

    Example: nightjar submit requests.jsonl --priority 3 --completion-window 24h

    Example: nightjar submit task.toml --watch
    """
    options: SubmitOptions = {
        "idempotency_key": key,
        "completion_window": completion_window,
        "priority": priority,
        "model": model,
        "wait_for_model": wait_for_model,
        "keep_results": keep_results,
    }
    if is_task_file(source):
        from nightjar.pipeline.front.cli.task_jobs import submit_task

        submit_task(source, api_url, options, watch=watch, as_json=as_json)
        return
    _check_lines(source)
    with connect(api_url) as client:
        job = client.submit(source, **options)
        found = tell_submitted(job, as_json=as_json and not watch)
        if watch:
            found = watched(job, as_json=as_json)
            if not as_json:
                print_json(found.raw, as_json=False)
    exit_by_outcome(found, watch=watch)


def _check_lines(source: Path) -> None:
    """End the command where a file cannot hold batch lines."""
    from nightjar.pipeline.files.formats import UnusableInputError, check_format

    if not source.is_file():
        fail(f"the input {source} is not a file", EXIT_USAGE)
    try:
        check_format(source)
    except UnusableInputError as error:
        fail(f"the input {source} {error}", EXIT_USAGE)
    except OSError as error:
        fail(f"the input {source}: {error.strerror}", EXIT_USAGE)


def status(
    job_id: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="A job's id; without one, the deployment is shown."),
    ] = None,
    api_url: ApiUrl = DEFAULT_API,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the progress until the job is over.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a job's state and counts; what it waits for goes to standard error.

    Without JOB: show which parts of the deployment work, and how to start those that do not.

    Exit status: 0, or with --watch: 0 every row succeeded, 3 some rows failed, 4 no row succeeded.
    1 the API cannot say, or without JOB: a part does not work. With --watch --json, each change is
    a line.

    Example: nightjar status job_0198c5 --watch

    Example: nightjar status
    """
    if job_id is None:
        if watch:
            fail("--watch needs JOB", EXIT_USAGE)
        show_deployment(api_url, as_json=as_json)
        return
    with connect(api_url) as client:
        job = client.job(job_id)
        found = watched(job, as_json=as_json) if watch else job.status()
    if not (watch and as_json):
        print_json(found.raw, as_json=as_json)
    if found.waiting:
        say(f"it waits: {found.waiting}")
    if watch:
        exit_by_outcome(found, watch=True)


def results(
    job_id: JobId,
    api_url: ApiUrl = DEFAULT_API,
    outcome: Annotated[Outcome, typer.Option(help="Which rows.")] = Outcome.ALL,
    _: Annotated[
        bool, typer.Option("--json", help="Changes nothing: results are lines of JSON.")
    ] = False,
) -> None:
    """Print the results of a job so far, as OpenAI batch output lines.

    Exit status: 0 all that was asked for was printed, 1 it was not.

    Example: nightjar results job_0198c5 --outcome failed
    """
    with connect(api_url) as client:
        for one in client.job(job_id).results(outcome.value):
            print_json(one.raw, as_json=True)


def cancel(job_id: JobId, api_url: ApiUrl = DEFAULT_API, as_json: AsJson = False) -> None:
    """Cancel a job; stored results stay.

    Example: nightjar cancel job_0198c5
    """
    _steer(api_url, job_id, lambda job: job.cancel(), as_json=as_json)


def pause(job_id: JobId, api_url: ApiUrl = DEFAULT_API, as_json: AsJson = False) -> None:
    """Pause a job: no more of it starts, and running micro-batches finish.

    Example: nightjar pause job_0198c5
    """
    _steer(api_url, job_id, lambda job: job.pause(), as_json=as_json)


def resume(job_id: JobId, api_url: ApiUrl = DEFAULT_API, as_json: AsJson = False) -> None:
    """Continue a paused job.

    Example: nightjar resume job_0198c5
    """
    _steer(api_url, job_id, lambda job: job.resume(), as_json=as_json)


def retry(job_id: JobId, api_url: ApiUrl = DEFAULT_API, as_json: AsJson = False) -> None:
    """Compute requests again whose failure they did not cause, such as a crash.

    Example: nightjar retry job_0198c5
    """
    _steer(api_url, job_id, lambda job: job.retry(), as_json=as_json)


def _steer(
    api_url: str, job_id: str, change: "Callable[[Job], JobStatus]", *, as_json: bool
) -> None:
    """Ask for a change of a job, and print the job that the API answers with."""
    with connect(api_url) as client:
        print_json(change(client.job(job_id)).raw, as_json=as_json)
