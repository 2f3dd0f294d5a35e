"""Commands for task files: plan one, and print their JSON schema."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from nightjar.pipeline.front.cli.console import EXIT_USAGE, fail

if TYPE_CHECKING:
    from nightjar.pipeline.tasks.task_file import TaskFile

task = typer.Typer(name="task", help="Help with writing task files.", no_args_is_help=True)


@task.command()
def schema() -> None:
    """Print the JSON schema of task files, for editors."""
    from nightjar.pipeline.tasks.task_file import json_schema

    typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


def open_task(path: Path) -> "TaskFile":
    """Read a task file; end the command where it cannot be used, or packages are missing."""
    from nightjar.pipeline.tasks.errors import MISSING_EXTRA, TaskError
    from nightjar.pipeline.tasks.task_file import read_task

    if find_spec("pyarrow") is None:
        fail(MISSING_EXTRA, EXIT_USAGE)
    try:
        return read_task(path)
    except TaskError as error:
        fail(str(error), EXIT_USAGE)


def task_model(file: "TaskFile", given: Path | None) -> Path:
    """Return the model's directory: the one of the command line, else that of the task."""
    if given is not None:
        return given
    if file.task.model is None:
        fail(f"{file.path} names no model; add `model`, or give --model DIR", EXIT_USAGE)
    return file.folder / file.task.model
