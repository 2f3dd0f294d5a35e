"""The records of models: what a deployment plans for, and who serves it."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that the planner plans for; filled by the planner."""

    name: str  # in requests and answers
    fingerprint: str  # of its files
    context_length: int  # tokens


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that jobs may name; filled by the store."""

    name: str
    fingerprint: str
    context_length: int
    created_at: datetime  # when these files were first planned for under this name
    workers: int  # GPU workers that serve it and have given a sign of life lately

    @property
    def is_served(self) -> bool:
        """Whether a GPU worker that serves it lives."""
        return self.workers > 0
