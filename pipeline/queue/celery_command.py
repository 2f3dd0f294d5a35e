"""Celery's own two commands: `python -m nightjar.pipeline.queue.celery_command APP worker|beat`.

`python -m celery -A APP worker|beat ...` does the same, but first loads all other commands, such as
Flower and an interactive shell. That takes most of a second of processor time at every start, also
when a killed worker is started again.
"""

import logging
import sys
from importlib import import_module
from typing import TextIO

import celery.apps.worker
from celery.bin.base import CLIContext
from celery.bin.beat import beat
from celery.bin.worker import worker

from nightjar.logs import configure, is_json, name_process
from nightjar.pipeline.queue.commands import CLOCK_APP, GPU_WORKER_APP, PLANNER_APP
from nightjar.process import without_collections

PROCESSES = {PLANNER_APP: "planner", GPU_WORKER_APP: "gpu-worker", CLOCK_APP: "beat"}
COMMANDS = {"beat": beat, "worker": worker}


def main() -> None:
    """Run the command until its process is told to end."""
    name, command, *options = sys.argv[1:]
    name_process(PROCESSES.get(name, command))
    quiet = is_json()
    if quiet:  # neither Celery's banner, its words at a signal nor Python's warnings are JSON
        configure()
        logging.captureWarnings(True)
        celery.apps.worker.safe_say = _say_nothing
    with without_collections():
        app = import_module(name).app
    context = CLIContext(app=app, no_color=False, workdir=None, quiet=quiet)
    COMMANDS[command].main(args=options, prog_name=f"celery {command}", obj=context)


def _say_nothing(message: str, stream: TextIO | None = None) -> None:
    """Stand in for Celery's `safe_say`, which writes plain text to the log's stream at a signal."""


if __name__ == "__main__":
    main()
