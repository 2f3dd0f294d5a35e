"""Shared by all commands: options, exit statuses, messages, and the checks before a start."""

import json
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from nightjar.jobs.errors import NO_POSTGRES_DRIVER, POSTGRES_DRIVER
from nightjar.pipeline.settings import Settings, SettingsError
from nightjar.visible import visible_lines

EXIT_RUN = 1
EXIT_USAGE = 2
EXIT_ROWS_FAILED = 3
EXIT_NO_ROW_SUCCEEDED = 4

STOPPED = "stopped; run the same command again to continue"

TASK_SUFFIXES = (".toml", ".yaml", ".yml")

Source = Annotated[Path, typer.Argument(metavar="IN.jsonl", help="OpenAI batch lines.")]
Input = Annotated[
    Path,
    typer.Argument(metavar="IN", help="OpenAI batch lines, or a task file (.toml, .yaml)."),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda or cuda:<number> (default: NIGHTJAR_DEVICE, else cpu)."),
]
PromptVectors = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt-vector",
        "--adapter",
        metavar="NAME=FILE",
        help="Prompt vectors, or a LoRA adapter's directory, that requests may name.",
    ),
]
Shards = Annotated[
    int | None,
    typer.Option(min=1, help="Processes that the model is split over (default: one per device)."),
]
Devices = Annotated[
    str | None,
    typer.Option(metavar="0,1,...", help="CUDA devices, one per shard (default: --device)."),
]

Verify = Annotated[
    str | None,
    typer.Option(
        help="auto: verify a model quickly at its first start (default: NIGHTJAR_VERIFY, else "
        "auto); off: serve it as it is."
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on one line, and nothing else.")]

errors = Console(stderr=True, soft_wrap=True)
"""Standard error, for messages to the user."""


def print_json(value: object, *, as_json: bool) -> None:
    """Print a JSON value: for people in several lines, for programs (`as_json`) in one."""
    if as_json:
        typer.echo(json.dumps(value, ensure_ascii=False))
    else:
        typer.echo(json.dumps(value, indent=2))


def say(message: str) -> None:
    """Print a message to the user on standard error; text of others in it steers no terminal."""
    errors.print(f"nightjar: {visible_lines(message)}", highlight=False, markup=False)


def fail(message: str, code: int) -> NoReturn:
    """Print the reason, and end the command with this status."""
    say(message)
    raise typer.Exit(code)


def end_interrupted(message: str, number: int = signal.SIGINT) -> NoReturn:
    """End the command after a signal; an impatient second one must not change its status."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    say(message)
    raise typer.Exit(128 + number)


def named_files(values: list[str]) -> dict[str, Path]:
    """Read NAME=FILE options."""
    vectors = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not (name and equals and path):
            fail(
                f"--prompt-vector or --adapter {value!r}: write NAME=FILE.safetensors, or NAME=DIR",
                EXIT_USAGE,
            )
        vectors[name] = Path(path)
    return vectors


def is_task_file(path: Path) -> bool:
    """Whether a path names a task file, by its ending."""
    return path.suffix.lower() in TASK_SUFFIXES


def read_settings() -> Settings:
    """Read the settings of the environment; end the command where one cannot be used."""
    try:
        return Settings.read()
    except SettingsError as error:
        fail(str(error), EXIT_USAGE)


def require_one_device_option(device: str | None, devices: str | None) -> None:
    """End the command where both options are given."""
    if device is not None and devices is not None:
        fail(f"--device {device} --devices {devices}: give one of them", EXIT_USAGE)


def check_driver(settings: Settings) -> None:
    """End the command where PostgreSQL's driver is missing; Celery would show a traceback."""
    url = settings.database_url.get_secret_value()
    if url.startswith("postgres") and find_spec(POSTGRES_DRIVER) is None:
        fail(NO_POSTGRES_DRIVER, EXIT_RUN)


def check_tables() -> None:
    """End the command where the packages of task files are missing."""
    from nightjar.pipeline.tasks.errors import MISSING_EXTRA

    if find_spec("pyarrow") is None:
        fail(MISSING_EXTRA, EXIT_USAGE)


def check_models(settings: Settings) -> dict[str, Path]:
    """Return the directory of each model; end the command where one cannot be used."""
    from nightjar.checkpoints import CheckpointError, ModelDirectory, check_shards

    paths = settings.model_paths
    if not paths:
        fail(
            "set NIGHTJAR_MODEL to the directory of the served model, or NIGHTJAR_MODELS to "
            "NAME=DIRECTORY of several",
            EXIT_USAGE,
        )
    for name, path in paths.items():
        try:
            check_shards(ModelDirectory.open(path).config, settings.shard_count)
        except CheckpointError as error:
            fail(f"the model {name!r}, {path}: {error}", EXIT_USAGE)
    return paths


def become(command: list[str]) -> NoReturn:
    """Replace this process by another program."""
    sys.stdout.flush()
    os.execv(command[0], command)  # noqa: S606 - Nightjar's own command line, no shell wanted
