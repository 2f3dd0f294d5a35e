"""Command lines of the long-running processes, and whose variables they do not read."""

import os
import sys

import pytest

from nightjar.pipeline.queue.commands import (
    WorkerRole,
    beat_command,
    flower_command,
    forget_celery_variables,
    worker_command,
)
from nightjar.pipeline.queue.queues import PLAN_QUEUE
from nightjar.pipeline.settings import Settings

PYTHON = [sys.executable, "-m"]


def test_a_planner_takes_the_planners_queue_alone() -> None:
    command = worker_command(WorkerRole.PLAN, Settings())
    assert command[:5] == [
        *PYTHON,
        "nightjar.pipeline.queue.celery_command",
        "nightjar.pipeline.planning.tasks",
        "worker",
    ]
    assert f"--queues={PLAN_QUEUE}" in command
    assert f"--hostname=planner-{os.getpid()}@%h" in command


def test_a_gpu_worker_finds_its_queues_by_itself() -> None:
    command = worker_command(
        WorkerRole.COMPUTE, Settings.read(worker_threads=7, worker_live_threads=3)
    )
    assert command[:5] == [
        *PYTHON,
        "nightjar.gpu_worker.worker",
        "nightjar.gpu_worker.worker.tasks",
        "worker",
    ]
    assert "--concurrency=10" in command
    assert f"--hostname=gpu-{os.getpid()}@%h" in command
    assert not [option for option in command if option.startswith("--queues")]


def test_a_gpu_worker_of_several_models_has_threads_for_each() -> None:
    settings = Settings.read(worker_threads=7, worker_live_threads=3, models="a=/a,b=/b")
    assert "--concurrency=17" in worker_command(WorkerRole.COMPUTE, settings)


@pytest.mark.parametrize("role", [WorkerRole.PLAN, WorkerRole.COMPUTE])
def test_workers_send_events_and_do_not_ask_each_other(role: WorkerRole) -> None:
    options = {"--pool=threads", "--task-events", "--without-gossip", "--without-mingle"}
    assert options <= set(worker_command(role, Settings()))


def test_what_runs_tasks_is_no_celery_worker() -> None:
    command = worker_command(WorkerRole.TASKS, Settings())
    assert command == [*PYTHON, "nightjar.pipeline.runner.process"]


def test_beat_keeps_its_schedule_in_memory() -> None:
    assert beat_command() == [
        *PYTHON,
        "nightjar.pipeline.queue.celery_command",
        "nightjar.pipeline.queue.clock",
        "beat",
        "--scheduler",
        "nightjar.pipeline.queue.clock:Scheduler",
        "--loglevel=INFO",
    ]


def test_flower_steers_nothing() -> None:
    command = flower_command("127.0.0.1", 5555)
    assert command[-3:] == ["--address=127.0.0.1", "--port=5555", "--read_only"]


def test_another_applications_settings_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = {"APP", "BROKER_URL", "CONFIG_MODULE", "LOADER", "RESULT_BACKEND", "SKIP_CHECKS"}
    foreign |= {"CELERY_BROKER_URL", "CELERY_"}
    kept = {"NIGHTJAR_BROKER_URL", "MY_CELERY_URL"}
    for name in foreign | kept:
        monkeypatch.setenv(name, "somebody's")
    forget_celery_variables()
    assert os.environ.keys() & foreign == set()
    assert os.environ.keys() >= kept
