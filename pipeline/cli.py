"""The command `nightjar`. Heavy imports stand inside the commands, so that --help is quick."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn, get_args

import typer
from rich.console import Console

from nightjar import __version__
from nightjar.jobs.errors import NO_POSTGRES_DRIVER, POSTGRES_DRIVER, JobError
from nightjar.pipeline.commands import (
    WorkerRole,
    beat_command,
    flower_command,
    forget_celery_variables,
    worker_command,
)
from nightjar.pipeline.settings import Dtype, Settings, SettingsError

if TYPE_CHECKING:
    from nightjar.pipeline.client import Client

EXIT_RUN = 1
EXIT_USAGE = 2
EXIT_ROWS_FAILED = 3
EXIT_NO_ROW_SUCCEEDED = 4

DEFAULT_API = "http://127.0.0.1:8000"
ApiUrl = Annotated[
    str, typer.Option("--api", envvar="NIGHTJAR_API", help="Where `nightjar api` listens.")
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda or cuda:<number> (default: NIGHTJAR_DEVICE, else cpu)."),
]
Shards = Annotated[
    int | None,
    typer.Option(min=1, help="Processes that the model is split among (default: one a device)."),
]
Devices = Annotated[
    str | None,
    typer.Option(metavar="0,1,...", help="CUDA devices, one a shard (default: --device)."),
]


class Outcome(StrEnum):
    """Which results to show."""

    ALL = "all"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


app = typer.Typer(
    name="nightjar",
    help="Batch inference for GPT decoders: generation and ranking, from a file or a queue.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
_errors = Console(stderr=True, soft_wrap=True)


def _fail(message: str, code: int) -> NoReturn:
    _errors.print(f"nightjar: {message}", highlight=False, markup=False)
    raise typer.Exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nightjar {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options before the command."""


def _vector_options(values: list[str]) -> dict[str, Path]:
    vectors = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not (name and equals and path):
            _fail(f"--prompt-vector {value!r}: write NAME=FILE.safetensors", EXIT_USAGE)
        vectors[name] = Path(path)
    return vectors


@app.command()
def run(  # noqa: PLR0913, PLR0917 - one for each option
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="OpenAI batch lines.")],
    model: Annotated[Path, typer.Option(metavar="DIR", help="A Hugging Face model directory.")],
    out: Annotated[
        Path, typer.Option(metavar="OUT.jsonl", help="Successes; failures go to OUT.errors.jsonl.")
    ],
    dtype: Annotated[
        str, typer.Option(help="auto (the fastest that is safe), fp64, fp32, bf16, fp16 or int8.")
    ] = "auto",
    device: Device = None,
    workdir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="State of the run (default: OUT.jsonl.work).")
    ] = None,
    prompt_vector: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="Prompt vectors that requests may name."),
    ] = None,
    shards: Shards = None,
    devices: Devices = None,
    retry: Annotated[
        bool,
        typer.Option("--retry", help="Rows that failed through no fault of theirs, once more."),
    ] = False,
    accept_any_model: Annotated[
        bool,
        typer.Option("--accept-any-model", help="Compute lines that name another model, too."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace output files that hold something else.")
    ] = False,
    reuse_results: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Answers that runs share: what one has computed, others reuse."
        ),
    ] = None,
) -> None:
    """Compute a whole file on this machine; run it again to go on where it stopped.

    Exit status: 0 every row succeeded, 1 the run could not go on, 2 unusable arguments,
    3 some rows failed, 4 no row succeeded.
    """
    from nightjar.pipeline.embedded.run import RunArguments, RunError
    from nightjar.pipeline.embedded.run import run as run_embedded
    from nightjar.pipeline.embedded.workdir import UsageError
    from nightjar.pipeline.progress import ProgressView, print_summary

    if dtype not in get_args(Dtype):
        _fail(f"--dtype {dtype!r}: use one of {', '.join(get_args(Dtype))}", EXIT_USAGE)
    _require_one_place(device, devices)
    if device is not None:
        os.environ["NIGHTJAR_DEVICE"] = device
    arguments = RunArguments(
        source=source,
        model=model,
        out=out,
        dtype=dtype,
        workdir=workdir,
        prompt_vectors=_vector_options(prompt_vector or []),
        retry=retry,
        overwrite=overwrite,
        accept_any_model=accept_any_model,
        reuse_results=reuse_results,
        shards=shards,
        devices=devices,
    )
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with ProgressView(_errors) as view:
            summary = run_embedded(arguments, view)
    except UsageError as error:
        _fail(str(error), EXIT_USAGE)
    except RunError as error:
        _fail(str(error), EXIT_RUN)
    except KeyboardInterrupt as interrupt:
        _errors.print("stopped; run the same command again to go on", highlight=False)
        number = interrupt.args[0] if interrupt.args else signal.SIGINT
        raise typer.Exit(128 + number) from None
    print_summary(_errors, summary)
    if not summary.job.completed:
        told = f"none of the {summary.job.total} rows succeeded"
        if summary.first_failure is not None:
            told += f"; the first failure: {summary.first_failure}"
        _fail(told, EXIT_NO_ROW_SUCCEEDED)
    if summary.job.failed or summary.job.cancelled:
        raise typer.Exit(EXIT_ROWS_FAILED)


def _interrupt(number: int, _: FrameType | None) -> NoReturn:
    """Let TERM end a run the way Ctrl-C does: services in order, state kept."""
    raise KeyboardInterrupt(number)


@app.command()
def worker(
    role: Annotated[WorkerRole, typer.Argument(help="plan: planner; compute: GPU worker.")],
    engine: Annotated[
        str | None,
        typer.Option(help="model; fake makes answers up without a model, to test what is around."),
    ] = None,
    device: Device = None,
    shards: Shards = None,
    devices: Devices = None,
) -> None:
    """Start a Celery worker; settings come from NIGHTJAR_* variables."""
    _require_one_place(device, devices)
    given = {"ENGINE": engine, "DEVICE": device, "SHARDS": shards, "DEVICES": devices}
    os.environ.update({f"NIGHTJAR_{k}": str(v) for k, v in given.items() if v is not None})
    settings = _settings()
    _check_driver(settings)
    _check_model(settings)
    _become(worker_command(role, settings))


@app.command()
def beat() -> None:
    """Start the clock (Celery beat): exactly one a deployment."""
    _settings()
    _become(beat_command())


@app.command()
def flower(
    address: Annotated[str, typer.Option(help="Interface to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 5555,
) -> None:
    """Start Flower, read-only; NIGHTJAR_FLOWER_AUTH=user:password protects it."""
    _settings()
    auth = os.environ.get("NIGHTJAR_FLOWER_AUTH") or None
    if auth is None and address not in ("127.0.0.1", "localhost", "::1"):
        _fail(
            f"--address {address} opens Flower to others: set NIGHTJAR_FLOWER_AUTH=user:password",
            EXIT_USAGE,
        )
    if auth is not None:
        os.environ["FLOWER_BASIC_AUTH"] = auth
    _become(flower_command(address, port))


@app.command()
def api(
    host: Annotated[str, typer.Option(help="Interface to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
) -> None:
    """Start the HTTP API: submit jobs, poll them, page through results."""
    from nightjar.pipeline.api_server import serve

    settings = _settings()
    _check_model(settings)
    serve(settings, host, port)


@app.command()
def health(
    part: Annotated[
        str, typer.Argument(metavar="planner|worker|beat", help="The process to ask after.")
    ],
) -> None:
    """Exit with 0 if this machine's planner, GPU worker or clock does its work, else with 1."""
    from nightjar.pipeline.health import Part, trouble

    if part not in list(Part):
        _fail(f"{part!r}: ask after one of {', '.join(Part)}", EXIT_USAGE)
    if (found := trouble(Part(part), _settings())) is not None:
        _fail(found, EXIT_RUN)
    typer.echo("ok")


@app.command()
def submit(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="OpenAI batch lines.")],
    api_url: ApiUrl = DEFAULT_API,
    key: Annotated[
        str | None, typer.Option(help="Idempotency key: sent twice, it makes one job.")
    ] = None,
    completion_window: Annotated[
        str | None, typer.Option(help="Such as 90m or 24h: what is not computed by then expires.")
    ] = None,
    priority: Annotated[
        int, typer.Option(min=0, max=9, help="Each step is worth an hour of waiting.")
    ] = 0,
) -> None:
    """Send a file to a running deployment; prints the job.

    Exit status: 0 the job is there, 1 it is not, 2 unusable arguments, 4 every row was rejected.
    """
    from nightjar.pipeline.formats import UnusableInputError, check_format, failure_text

    if not source.is_file():
        _fail(f"the input {source} is not a file", EXIT_USAGE)
    try:
        check_format(source)
    except UnusableInputError as error:
        _fail(f"the input {source} {error}", EXIT_USAGE)
    except OSError as error:
        _fail(f"the input {source}: {error.strerror}", EXIT_USAGE)
    with _client(api_url) as client:
        job = client.submit(source, key, completion_window, priority)
        typer.echo(json.dumps(job, indent=2))
        failed, total = job["counts"]["failed"], job["counts"]["total"]
        first = client.first_failure(job["id"]) if failed else None
    if first is not None:
        how = "were rejected" if "rejected" in job else "have failed"
        told = f"{failed} of {total} rows {how}; the first: {failure_text(first)}"
        _errors.print(f"nightjar: {told}", highlight=False, markup=False)
    if failed == total:
        raise typer.Exit(EXIT_NO_ROW_SUCCEEDED)


@app.command()
def status(job_id: str, api_url: ApiUrl = DEFAULT_API) -> None:
    """Show a job's state and counts; says on standard error what it waits for."""
    with _client(api_url) as client:
        job = client.job(job_id)
    typer.echo(json.dumps(job, indent=2))
    if job.get("waiting"):
        _errors.print(f"nightjar: it waits: {job['waiting']}", highlight=False, markup=False)


@app.command()
def results(
    job_id: str,
    api_url: ApiUrl = DEFAULT_API,
    outcome: Annotated[Outcome, typer.Option(help="Which rows.")] = Outcome.ALL,
) -> None:
    """Print what has landed of a job, as OpenAI batch output lines."""
    with _client(api_url) as client:
        for line in client.results(job_id, outcome.value):
            typer.echo(json.dumps(line, ensure_ascii=False))


@app.command()
def cancel(job_id: str, api_url: ApiUrl = DEFAULT_API) -> None:
    """Cancel a job; what has landed stays."""
    with _client(api_url) as client:
        typer.echo(json.dumps(client.cancel(job_id), indent=2))


@app.command()
def pause(job_id: str, api_url: ApiUrl = DEFAULT_API) -> None:
    """Begin nothing more of a job; what is being computed finishes."""
    with _client(api_url) as client:
        typer.echo(json.dumps(client.pause(job_id), indent=2))


@app.command()
def resume(job_id: str, api_url: ApiUrl = DEFAULT_API) -> None:
    """Go on with a paused job."""
    with _client(api_url) as client:
        typer.echo(json.dumps(client.resume(job_id), indent=2))


@app.command()
def retry(job_id: str, api_url: ApiUrl = DEFAULT_API) -> None:
    """Compute again what failed through no fault of the request, such as what crashed."""
    with _client(api_url) as client:
        typer.echo(json.dumps(client.retry(job_id), indent=2))


@contextmanager
def _client(api_url: str) -> "Iterator[Client]":
    from nightjar.pipeline.client import Client, ClientError

    try:
        with Client(api_url) as client:
            yield client
    except ClientError as error:
        _fail(str(error), EXIT_RUN)


@app.command()
def vectors(
    name: Annotated[str, typer.Argument(help="What requests write in prompt_vector.")],
    file: Annotated[Path, typer.Argument(help="A safetensors file, one tensor (rows, width).")],
) -> None:
    """Register prompt vectors (P-tuning) in the database under a name."""
    from nightjar.checkpoints import ModelDirectory
    from nightjar.jobs.store import Store
    from nightjar.pipeline.vectors import VectorsError, register_vectors

    settings = _settings()
    model = _check_model(settings)
    store = Store(settings.database_url.get_secret_value())
    try:
        width = ModelDirectory.open(model).config.hidden_size
        registered = register_vectors(store.vectors, name, file, width)
    except VectorsError as error:
        _fail(str(error), EXIT_USAGE)
    finally:
        store.close()
    typer.echo(f"{registered.name}, version {registered.version}: {registered.length} vectors")


@app.command()
def migrate() -> None:
    """Bring the database to this version's tables; safe to run twice at once."""
    from nightjar.jobs.store import Store

    store = Store(_settings().database_url.get_secret_value())
    store.migrate()
    store.close()


def _require_one_place(device: str | None, devices: str | None) -> None:
    if device is not None and devices is not None:
        _fail(f"--device {device} --devices {devices}: give one of them", EXIT_USAGE)


def _settings() -> Settings:
    try:
        return Settings.read()
    except SettingsError as error:
        _fail(str(error), EXIT_USAGE)


def _check_driver(settings: Settings) -> None:
    """Before Celery starts, which would show a traceback."""
    url = settings.database_url.get_secret_value()
    if url.startswith("postgres") and find_spec(POSTGRES_DRIVER) is None:
        _fail(NO_POSTGRES_DRIVER, EXIT_RUN)


def _check_model(settings: Settings) -> Path:
    from nightjar.checkpoints import CheckpointError, ModelDirectory, check_shards

    if settings.model is None:
        _fail("set NIGHTJAR_MODEL to the directory of the served model", EXIT_USAGE)
    try:
        check_shards(ModelDirectory.open(settings.model).config, settings.shard_count)
    except CheckpointError as error:
        _fail(f"NIGHTJAR_MODEL {settings.model}: {error}", EXIT_USAGE)
    return settings.model


def _become(command: list[str]) -> NoReturn:
    sys.stdout.flush()
    os.execv(command[0], command)  # noqa: S606 - our own command line, no shell wanted


def main() -> None:
    """Entry point of the command."""
    forget_celery_variables()
    try:
        app()
    except JobError as error:
        _errors.print(f"nightjar: {error}", highlight=False, markup=False)
        sys.exit(EXIT_RUN)
