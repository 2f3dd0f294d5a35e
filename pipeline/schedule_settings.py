"""Settings of schedules; a part of `Settings`."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings


class ScheduleSettings(BaseSettings):
    """Where task files are that the API may name, and how much of them runs at once."""

    task_folder: Path | None = Field(
        None,
        description="folder of task files that schedules of the API may name; those of a tenant "
        "are in the folder of its name within",
    )
    task_threads: int = Field(
        2,
        ge=1,
        le=64,
        description="runs of tasks that `nightjar worker tasks` reads or writes at a time",
    )
    schedule_keep_days: float = Field(
        90.0, ge=2, description="runs of schedules that are older are deleted from their history"
    )
