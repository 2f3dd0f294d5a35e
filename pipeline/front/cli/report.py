"""`nightjar report`: what became of a job and what it cost, as a page or as JSON."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nightjar.pipeline.front.cli.console import (
    EXIT_RUN,
    EXIT_USAGE,
    AsJson,
    fail,
    print_json,
    read_settings,
    say,
)
from nightjar.pipeline.front.cli.deployment import DEFAULT_API, ApiUrl
from nightjar.pipeline.front.cli.stored import opened_store

if TYPE_CHECKING:
    from nightjar.jobs.store import Store


def report(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB", help="The job's id, or the work directory of a `nightjar run`."
        ),
    ],
    api_url: ApiUrl = DEFAULT_API,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page (default: JOB.report.html).")
    ] = None,
    database: Annotated[
        bool,
        typer.Option("--database", help="Read NIGHTJAR_DATABASE_URL, and not through the API."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write what became of a job, and what it cost, as one HTML file that loads nothing.

    Exit status: 0 the report was written, 1 it was not, 2 unusable arguments.

    Example: nightjar report job_0198c5 --out report.html
    """
    folder = Path(job)
    if folder.is_dir():
        _of_run(folder, out, as_json=as_json)
        return
    if "/" in job or not job.isprintable():
        fail(f"{job!r} is neither the id of a job nor a work directory that is there", EXIT_USAGE)
    if database:
        with opened_store(read_settings()) as store:
            _of_store(store, job, out or Path(f"{job}.report.html"), as_json=as_json)
        return
    path = f"/v1/jobs/{job}/report{'' if as_json else '.html'}"
    text = _asked(api_url, path)
    if as_json:
        typer.echo(text)
        return
    _write(out or Path(f"{job}.report.html"), text)


def _of_run(folder: Path, out: Path | None, *, as_json: bool) -> None:
    """Report on the run that keeps its state in a work directory."""
    from contextlib import closing

    from nightjar.jobs.errors import JobError
    from nightjar.jobs.store import Store
    from nightjar.pipeline.embedded.workdir import database_path, sqlite_url

    if not database_path(folder).is_file():
        fail(f"{folder} is not the work directory of a run: it holds no nightjar.db", EXIT_USAGE)
    with closing(Store(sqlite_url(database_path(folder)))) as store:
        try:
            newest = next(iter(store.jobs.newest(limit=1)), None)
        except JobError as error:
            fail(f"{folder}: {error}", EXIT_RUN)
        if newest is None:
            fail(f"{folder} holds no job yet", EXIT_RUN)
        _of_store(store, newest.id, out or folder / "report.html", as_json=as_json)


def _of_store(store: "Store", job_id: str, out: Path, *, as_json: bool) -> None:
    from nightjar.jobs.errors import JobError
    from nightjar.jobs.report.page import ReportContext, render_report, report_json

    try:
        made = store.reports.of_job(job_id)
    except JobError as error:
        fail(str(error), EXIT_RUN)
    context = ReportContext(job_id)
    if as_json:
        print_json(report_json(made, context), as_json=True)
    else:
        _write(out, render_report(made, context))


def _asked(api_url: str, path: str) -> str:
    """Ask the API; what it refuses ends the command."""
    import httpx

    from nightjar.pipeline.client.connecting import Connecting
    from nightjar.pipeline.client.errors import ClientError

    connecting = Connecting(api_url, None, retries=0, timeout_s=120.0)
    try:
        with httpx.Client(**connecting.http_options()) as client:
            answer = client.get(path)
    except ClientError as error:
        fail(str(error), EXIT_RUN)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"{api_url} cannot be reached: {error}; is `nightjar api` running?", EXIT_RUN)
    if answer.status_code != httpx.codes.OK:
        try:
            told = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            told = f"it answered {answer.status_code}"
        fail(f"{api_url}: {told}", EXIT_RUN)
    return answer.text


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"--out {path}: {error.strerror}", EXIT_RUN)
    say(f"report: {path}")
