"""Commands for task files: plan one, and print their JSON schema."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nightjar.pipeline.front.cli.console import (
    EXIT_NO_ROW_SUCCEEDED,
    EXIT_ROWS_FAILED,
    EXIT_RUN,
    EXIT_USAGE,
    AsJson,
    PromptVectors,
    check_tables,
    fail,
    named_files,
    print_json,
)

if TYPE_CHECKING:
    from nightjar.pipeline.tasks.task_file import TaskFile

task = typer.Typer(name="task", help="Help with writing task files.", no_args_is_help=True)


@task.command()
def schema() -> None:
    """Print the JSON schema of task files, for editors.

    Example: nightjar task schema > task.schema.json
    """
    from nightjar.pipeline.tasks.task_file import json_schema

    typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


def plan(
    source: Annotated[Path, typer.Argument(metavar="TASK", help="A task file (.toml, .yaml).")],
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The model's directory (default: the task's)."),
    ] = None,
    prompt_vector: PromptVectors = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(min=0, help="Of the machine, in any currency: the cost is expected, too."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read a task's rows and count what they will cost; nothing is computed or written.

    Exit status: 0 every row can be used; 1 the source was lost; 2 the task cannot be used;
    3 some rows cannot be used or repeat a key; 4 no row can be used.

    Example: nightjar plan task.toml --price-per-hour 2.50
    """
    from nightjar.checkpoints import CheckpointError, ModelDirectory
    from nightjar.pipeline.embedded.work import RunError
    from nightjar.pipeline.embedded.workdir import UsageError, last_speed
    from nightjar.pipeline.files.vectors import VectorsError

    file = open_task(source)
    from nightjar.pipeline.front.task_plan import (
        forecast,
        plan_json,
        plan_lines,
        plan_rows,
        planning_encoder,
    )
    from nightjar.pipeline.front.task_work import TaskWork

    directory = task_model(file, model)
    work = TaskWork(file, None, os.environ)
    vectors = task_vectors(file) | named_files(prompt_vector or [])
    try:
        opened = ModelDirectory.open(directory)
        work.prepare(opened, with_sink=False)
        with planning_encoder(opened, vectors) as encoder:
            found = plan_rows(work.rows(None), encoder)
    except (CheckpointError, VectorsError, UsageError) as error:
        fail(str(error), EXIT_USAGE)
    except RunError as error:
        fail(str(error), EXIT_RUN)
    expected = forecast(found, last_speed(work.workdir), price_per_hour)
    if as_json:
        print_json(plan_json(found, expected), as_json=True)
    else:
        for line in plan_lines(found, expected):
            typer.echo(line)
    if not found.requests:
        raise typer.Exit(EXIT_NO_ROW_SUCCEEDED)
    if found.bad or found.repeat is not None:
        raise typer.Exit(EXIT_ROWS_FAILED)


def open_task(path: Path) -> "TaskFile":
    """Read a task file; end the command where it cannot be used, or packages are missing."""
    check_tables()
    from nightjar.pipeline.tasks.errors import TaskError
    from nightjar.pipeline.tasks.task_file import read_task

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


def task_vectors(file: "TaskFile") -> dict[str, Path]:
    """Return the files of prompt vectors that a task names."""
    return {name: file.folder / path for name, path in file.task.prompt_vectors.items()}


def task_answers(file: "TaskFile") -> Path | None:
    """Return the file in which a task keeps its answers, if it names one."""
    kept = file.task.reuse_results
    return None if kept is None else file.folder / Path(kept).expanduser()
