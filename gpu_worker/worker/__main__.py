"""Entry point of a GPU worker: `python -m nightjar.gpu_worker.worker APP worker ...`.

The models are loaded while Celery and SQL are imported: each takes seconds.
"""

import sys

from nightjar.checkpoints import CheckpointError
from nightjar.gpu_worker.worker.flights import LauncherError
from nightjar.gpu_worker.worker.starting import end, start
from nightjar.logs import configure, is_json, name_process
from nightjar.pipeline.queue.commands import CANNOT_START, EXIT_CANNOT_START
from nightjar.pipeline.settings import Settings, SettingsError


def main() -> None:
    """Work until the process is told to end."""
    name_process("gpu-worker")
    if is_json():
        configure()
    try:
        start(Settings.read())
    except (CheckpointError, LauncherError, SettingsError) as error:
        sys.stderr.write(f"{CANNOT_START}{error}\n")
        raise SystemExit(EXIT_CANNOT_START) from error
    try:
        from nightjar.pipeline.queue import celery_command

        celery_command.main()
    finally:
        end()


if __name__ == "__main__":
    main()
