"""Settings that say which results are kept, for how long; a part of `Settings`."""

from typing import Annotated

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings

from nightjar.pipeline.settings.read_by import API, COMMANDS, GPU_WORKER, PLANNER, read_by

REUSING = read_by(PLANNER, API, GPU_WORKER)


class ReuseSettings(BaseSettings):
    """Reused results."""

    reuse_results: Annotated[bool, REUSING] = Field(
        False, description="answer requests that an earlier job has asked from what was kept of it"
    )
    result_cache_url: Annotated[SecretStr | None, REUSING] = Field(
        None, description="database of the answers that are kept; the jobs' own unless given"
    )
    result_cache_rows: Annotated[int, REUSING] = Field(
        1_000_000, ge=1, description="most answers that are kept"
    )
    result_cache_scores: Annotated[int, REUSING] = Field(
        10_000_000, ge=1, description="most scores of documents that are kept"
    )
    result_cache_days: Annotated[float, REUSING] = Field(
        30.0, gt=0, description="answers older than this are dropped"
    )


class RetentionSettings(BaseSettings):
    """Retention."""

    keep_results_days: Annotated[
        float | None, read_by(PLANNER, COMMANDS, page="guides/retention.md")
    ] = Field(
        None,
        ge=1 / 24,
        le=36_500,
        description="the requests and results of a job are deleted so long after its end; by "
        "default they are kept for ever, and at least for an hour",
    )

    purge_only_exported: Annotated[bool, read_by(PLANNER, COMMANDS, page="guides/export.md")] = (
        Field(
            False,
            description="a job is purged only after `nightjar export` has written its results, "
            "unless it is named",
        )
    )

    @property
    def keep_results_s(self) -> float | None:
        """The retention in seconds; None for ever."""
        days = self.keep_results_days
        return None if days is None else days * 86_400.0
