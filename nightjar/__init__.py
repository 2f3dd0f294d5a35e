"""Nightjar: batch inference for GPT decoders through a message queue.

The folders of the repository's root are linked into this package, so that all are
imported under one name: docs/explanations/structure.md. The names of the Python client are
loaded at their first use, because most processes never use them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nightjar.pipeline.client.asynchronous import AsyncClient, AsyncJob, AsyncOpenJob
    from nightjar.pipeline.client.asynchronous_schedules import AsyncSchedules
    from nightjar.pipeline.client.blocking import Client, Job, OpenJob
    from nightjar.pipeline.client.errors import (
        ClientError,
        RefusedError,
        RequestError,
        UnfinishedError,
        UnreachableError,
        WaitTimeoutError,
    )
    from nightjar.pipeline.client.records import JobStatus, Model, Result, RowError
    from nightjar.pipeline.client.requests import Chat, Generate, Rank
    from nightjar.pipeline.client.schedule_records import (
        Schedule,
        ScheduleChange,
        ScheduleCheck,
        ScheduleRun,
    )
    from nightjar.pipeline.client.schedules import Schedules

__version__ = "0.1.0"

_CLIENT = {
    "asynchronous": ("AsyncClient", "AsyncJob", "AsyncOpenJob"),
    "asynchronous_schedules": ("AsyncSchedules",),
    "blocking": ("Client", "Job", "OpenJob"),
    "errors": (
        "ClientError",
        "RefusedError",
        "RequestError",
        "UnfinishedError",
        "UnreachableError",
        "WaitTimeoutError",
    ),
    "records": ("JobStatus", "Model", "Result", "RowError"),
    "requests": ("Chat", "Generate", "Rank"),
    "schedule_records": ("Schedule", "ScheduleChange", "ScheduleCheck", "ScheduleRun"),
    "schedules": ("Schedules",),
}
_MODULES = {name: module for module, names in _CLIENT.items() for name in names}

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "AsyncOpenJob",
    "AsyncSchedules",
    "Chat",
    "Client",
    "ClientError",
    "Generate",
    "Job",
    "JobStatus",
    "Model",
    "OpenJob",
    "Rank",
    "RefusedError",
    "RequestError",
    "Result",
    "RowError",
    "Schedule",
    "ScheduleChange",
    "ScheduleCheck",
    "ScheduleRun",
    "Schedules",
    "UnfinishedError",
    "UnreachableError",
    "WaitTimeoutError",
    "__version__",
]


def __getattr__(name: str) -> object:
    """Load a name of the client."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"nightjar.pipeline.client.{_MODULES[name]}"), name)
    globals()[name] = found  # looked up once
    return found


def __dir__() -> list[str]:
    """Name the client's names among this module's."""
    return sorted({*globals(), *__all__})
