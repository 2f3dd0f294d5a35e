"""`nightjar export`: the results of a job that is over, as files."""

import os
from functools import partial
from importlib.util import find_spec
from typing import Annotated

import typer

from nightjar.pipeline.front.cli.console import (
    EXIT_RUN,
    EXIT_USAGE,
    AsJson,
    errors,
    fail,
    print_json,
    read_settings,
    say,
)
from nightjar.pipeline.front.cli.stored import opened_store


def export(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")],
    to: Annotated[
        str, typer.Option("--to", metavar="PLACE", help="A folder, or s3://BUCKET/PREFIX.")
    ],
    format_: Annotated[
        str, typer.Option("--format", metavar="jsonl|parquet", help="Of the files.")
    ] = "jsonl",
    rows_per_file: Annotated[int, typer.Option(min=1, help="Rows of a file.")] = 100_000,
    processes: Annotated[
        int | None, typer.Option(min=1, max=64, help="That write at once (default: the cores).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the results of a job that is over, in parallel, from the database itself.

    _manifest.json comes last: where it is, every file is there. If the command is ended in any way,
    the same command goes on.

    Exit status: 0 exported, 1 not exported, 2 unusable arguments.

    Example: nightjar export job_0198c5 --to exports/night --format parquet
    """
    from nightjar.pipeline.exports.exporting import ExportError, Progress
    from nightjar.pipeline.exports.exporting import export as export_job
    from nightjar.pipeline.exports.plan import Plan
    from nightjar.pipeline.exports.target import OBJECT_STORES, TargetError
    from nightjar.pipeline.queue.opening import open_store

    if format_ not in ("jsonl", "parquet"):
        fail(f"--format {format_}: write jsonl or parquet", EXIT_USAGE)
    if (format_ == "parquet" or to.startswith(OBJECT_STORES)) and find_spec("pyarrow") is None:
        fail("Parquet and object stores need: pip install 'nightjar-batch[tables]'", EXIT_USAGE)

    def tell(progress: Progress) -> None:
        if errors.is_terminal:
            say(f"{progress.parts} of {progress.of} files, {progress.rows} rows")

    settings = read_settings()
    with opened_store(settings) as store:
        found = store.jobs.get(job)
        if found.purged_at is not None:
            fail(f"job {job} was purged: its results are gone", EXIT_USAGE)
        if not found.is_over:
            fail(f"job {job} is {found.state.value}: export it when it is over", EXIT_USAGE)
        plan = Plan.of(found, "parquet" if format_ == "parquet" else "jsonl", rows_per_file)
        try:
            opened = partial(open_store, settings)
            count = processes or os.cpu_count() or 1
            made = export_job(store, opened, plan, to, min(count, max(1, len(plan.parts))), tell)
        except (ExportError, TargetError) as error:
            fail(str(error), EXIT_RUN)
        except OSError as error:
            fail(f"{to}: {error.strerror or error}; correct its rights, or name another", EXIT_RUN)
    summary = {"job": job, "rows": made.rows, "files": len(made.files)}
    summary |= {"bytes": sum(one.bytes for one in made.files)}
    if as_json:
        print_json(summary, as_json=True)
    else:
        typer.echo(f"exported {made.rows} rows of {job} to {to}; files: {len(made.files)}")
