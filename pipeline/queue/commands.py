"""Command lines of the long-running processes: Celery and Flower are started by name."""

import os
import sys
from enum import StrEnum

from nightjar.pipeline.queue.queues import PLAN_QUEUE
from nightjar.pipeline.settings import Settings

EXIT_CANNOT_START = 78
"""Exit status of a worker that cannot work with this configuration (EX_CONFIG of sysexits.h)."""

CANNOT_START = "nightjar worker: "
"""The last line of such a worker begins with this; the reason follows."""

CLOCK_APP = "nightjar.pipeline.queue.clock"
PLANNER_APP = "nightjar.pipeline.planning.tasks"
GPU_WORKER_APP = "nightjar.gpu_worker.worker.tasks"
_CELERY = "nightjar.pipeline.queue.celery_command"
_GPU_WORKER = "nightjar.gpu_worker.worker"  # the same, and loads its models meanwhile
TASK_RUNNER = "nightjar.pipeline.runner.process"

# Schedules are kept in memory: every entry is a short interval, and Celery's default scheduler
# would keep a pickle on the disk.
_MEMORY_SCHEDULER = "nightjar.pipeline.queue.clock:Scheduler"
PLANNER, GPU_WORKER = "planner", "gpu"  # what the names of Celery's workers begin with
_PLANNER_THREADS = 2


# What Celery's command line reads beside CELERY_*.
_CELERY_VARIABLES = {
    "APP",
    "BROKER_URL",
    "CONFIG_MODULE",
    "LOADER",
    "RESULT_BACKEND",
    "SKIP_CHECKS",
}


def forget_celery_variables() -> None:
    """Take other applications' Celery settings out of this process's environment.

    They would override Nightjar's: with another application's BROKER_URL, workers would join its
    broker.
    """
    for name in list(os.environ):
        if name.startswith("CELERY_") or name in _CELERY_VARIABLES:
            del os.environ[name]


class WorkerRole(StrEnum):
    """What a worker is for."""

    PLAN = "plan"
    COMPUTE = "compute"
    TASKS = "tasks"  # no Celery: it takes its work from SQL


def worker_command(role: WorkerRole, settings: Settings) -> list[str]:
    """Start a worker of this role."""
    if role is WorkerRole.TASKS:
        return [sys.executable, "-m", TASK_RUNNER]
    if role is WorkerRole.PLAN:
        return _worker(PLANNER_APP, PLANNER, [PLAN_QUEUE], _PLANNER_THREADS)
    # It reads its models itself, and listens on their queues.
    threads = settings.all_worker_threads
    return _worker(GPU_WORKER_APP, GPU_WORKER, [], threads, entry=_GPU_WORKER)


def beat_command() -> list[str]:
    """Start the clock that ticks the planner and the sweeper; one a deployment."""
    options = ["--scheduler", _MEMORY_SCHEDULER, "--loglevel=INFO"]
    return [*_celery(CLOCK_APP, "beat"), *options]


def flower_command(address: str, port: int) -> list[str]:
    """Start Flower; read-only, since jobs are steered through the API.

    The password is given in the variable FLOWER_BASIC_AUTH, because every user of a machine can
    read command lines.
    """
    command = [
        sys.executable,
        "-m",
        "nightjar.pipeline.front.flower_command",
        "-A",
        CLOCK_APP,
        "flower",
        f"--address={address}",
        f"--port={port}",
    ]
    return [*command, "--read_only"]


def _celery(app: str, command: str, entry: str = _CELERY) -> list[str]:
    return [sys.executable, "-m", entry, app, command]


def _worker(
    app: str, name: str, queues: list[str], threads: int, entry: str = _CELERY
) -> list[str]:
    return [
        *_celery(app, "worker", entry),
        "--pool=threads",
        f"--concurrency={threads}",
        *([f"--queues={','.join(queues)}"] if queues else []),
        f"--hostname={name}-{os.getpid()}@%h",
        "--task-events",
        "--without-gossip",
        "--without-mingle",
        "--loglevel=INFO",
    ]
