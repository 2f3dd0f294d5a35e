"""Command lines of the long-running processes: Celery and Flower are started by name."""

import os
import sys
from enum import StrEnum

from nightjar.pipeline.queues import PLAN_QUEUE, compute_queues
from nightjar.pipeline.settings import Settings

PLANNER_APP = "nightjar.pipeline.tasks"
GPU_WORKER_APP = "nightjar.gpu_worker.tasks"

# Schedules are kept in memory: every entry is a short interval, and Celery's default scheduler
# would keep a pickle on the disk.
_MEMORY_SCHEDULER = "celery.beat:Scheduler"
_PLANNER_THREADS = 2


class WorkerRole(StrEnum):
    """What a Celery worker is for."""

    PLAN = "plan"
    COMPUTE = "compute"


def worker_command(role: WorkerRole, settings: Settings, *, with_beat: bool = False) -> list[str]:
    """Start a Celery worker of this role.

    Args:
        role: Which queues it serves.
        settings: Number of threads.
        with_beat: Let a planner worker be the clock as well; only one clock may run.
    """
    if role is WorkerRole.PLAN:
        command = _worker(PLANNER_APP, "planner", [PLAN_QUEUE], _PLANNER_THREADS)
        return [*command, "--beat", "--scheduler", _MEMORY_SCHEDULER] if with_beat else command
    return _worker(GPU_WORKER_APP, "gpu", compute_queues(), settings.worker_threads)


def beat_command() -> list[str]:
    """Start the clock that ticks the planner and the sweeper."""
    return [*_celery(PLANNER_APP), "beat", "--scheduler", _MEMORY_SCHEDULER, "--loglevel=INFO"]


def flower_command(address: str, port: int, basic_auth: str | None) -> list[str]:
    """Start Flower; read-only, since jobs are steered through the API."""
    command = [*_celery(PLANNER_APP), "flower", f"--address={address}", f"--port={port}"]
    command += ["--read_only"]
    return command if basic_auth is None else [*command, f"--basic_auth={basic_auth}"]


def _celery(app: str) -> list[str]:
    return [sys.executable, "-m", "celery", "-A", app]


def _worker(app: str, name: str, queues: list[str], threads: int) -> list[str]:
    return [
        *_celery(app),
        "worker",
        "--pool=threads",
        f"--concurrency={threads}",
        f"--queues={','.join(queues)}",
        f"--hostname={name}-{os.getpid()}@%h",
        "--task-events",
        "--without-gossip",
        "--without-mingle",
        "--loglevel=INFO",
    ]
