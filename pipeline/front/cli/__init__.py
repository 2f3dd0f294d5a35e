"""The command `nightjar`. Heavy imports are inside the commands, so that --help is quick."""

import sys
from typing import Annotated

import typer

from nightjar import __version__
from nightjar.jobs.errors import JobError
from nightjar.pipeline.front.cli.accounts import keys, tenants
from nightjar.pipeline.front.cli.bill import bill
from nightjar.pipeline.front.cli.console import EXIT_RUN, say
from nightjar.pipeline.front.cli.convert import convert
from nightjar.pipeline.front.cli.database import migrate, shares
from nightjar.pipeline.front.cli.doctor import doctor
from nightjar.pipeline.front.cli.export import export
from nightjar.pipeline.front.cli.jobs import cancel, pause, results, resume, retry, status, submit
from nightjar.pipeline.front.cli.models import models
from nightjar.pipeline.front.cli.openapi import openapi
from nightjar.pipeline.front.cli.processes import api, beat, flower, health, worker
from nightjar.pipeline.front.cli.purge import purge
from nightjar.pipeline.front.cli.report import report
from nightjar.pipeline.front.cli.run import run
from nightjar.pipeline.front.cli.schedules import schedules
from nightjar.pipeline.front.cli.tasks import plan, task
from nightjar.pipeline.front.cli.top import top
from nightjar.pipeline.front.cli.tune import tune
from nightjar.pipeline.front.cli.vectors import vectors
from nightjar.pipeline.front.cli.verify import verify
from nightjar.pipeline.front.cli.webhooks import webhooks
from nightjar.pipeline.queue.commands import forget_celery_variables

app = typer.Typer(
    name="nightjar",
    help="Batch inference for GPT decoders: generation and ranking, from a file or a queue.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    *(run, plan, worker, beat, flower, api, health),
    *(submit, status, results, report, bill, cancel, pause, resume, retry, models),
    *(convert, verify, tune, migrate, shares, export, purge, openapi, doctor, top),
):
    app.command()(command)
for group in (keys, schedules, tenants, task, vectors, webhooks):
    app.add_typer(group)


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


def main() -> None:
    """Entry point of the command."""
    forget_celery_variables()
    try:
        app(prog_name="nightjar")  # also as `python -m nightjar`, so that help and completion agree
    except JobError as error:
        say(str(error))
        sys.exit(EXIT_RUN)
