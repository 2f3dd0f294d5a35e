"""Settings of schedules; a part of `Settings`."""

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings

from nightjar.pipeline.settings.read_by import PLANNER, TASK_RUNNER, read_by


class ScheduleSettings(BaseSettings):
    """Schedules."""

    task_folder: Annotated[Path | None, read_by(TASK_RUNNER, page="guides/schedules.md")] = Field(
        None,
        description="folder of task files that schedules of the API may name; those of a tenant "
        "are in the folder of its name within",
    )
    task_threads: Annotated[int, read_by(TASK_RUNNER)] = Field(
        2,
        ge=1,
        le=64,
        description="runs of tasks that `nightjar worker tasks` reads or writes at a time",
    )
    schedule_keep_days: Annotated[float, read_by(PLANNER)] = Field(
        90.0, ge=2, description="runs of schedules that are older are deleted from their history"
    )
