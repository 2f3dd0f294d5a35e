"""The start-up message: the one argument that a process of a model's group is started with.

It is JSON. Fields with their default value are left out, so that `ps` shows the model and only what
was chosen for it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec

from nightjar.compute_config import ComputeConfig


@dataclass(frozen=True, slots=True)
class StartUp:
    """What a process is told when it starts.

    pipe: File descriptor; leads to the worker for rank 0, to rank 0 for the others.
    worker: Process id of the worker that this process ends with.
    life: File descriptor for signs of life; None for a process that is alone.
    meeting: A file that does not exist yet, where the ranks connect; None for one that is alone.
    followers: File descriptors of rank 0 that lead to ranks 1, 2, ...
    """

    config: ComputeConfig
    pipe: int
    worker: int | None = None
    rank: int = 0
    life: int | None = None
    meeting: Path | None = None
    followers: tuple[int, ...] = ()


def encode(start: StartUp) -> str:
    """Return the message as the argument of a command."""
    # Not msgspec's JSON: it cannot say infinity, and a path may hold bytes that are not UTF-8.
    return json.dumps(_given(start), default=_plain, ensure_ascii=False)


def decode(arguments: Sequence[str]) -> StartUp:
    """Read the message from a process's arguments.

    Raises:
        ValueError: It is not one argument, or its fields have other names or types.
    """
    if len(arguments) != 1:
        raise ValueError("give one argument, the start-up message; a GPU worker writes it")
    data = json.loads(arguments[0])
    start = msgspec.convert(data, StartUp, dec_hook=_from_plain)
    # A worker that has run since before an upgrade may write fields that this version lacks.
    for record, given in ((start, data), (start.config, data["config"])):
        unknown = given.keys() - {field.name for field in fields(record)}
        if unknown:
            raise ValueError(f"{type(record).__name__} has no field {min(unknown)}")
    return start


def _given(record: StartUp | ComputeConfig) -> dict[str, object]:
    """The fields that differ from their defaults."""
    named = [(field, getattr(record, field.name)) for field in fields(record)]
    return {field.name: value for field, value in named if value != field.default}


def _plain(value: object) -> object:
    return _given(value) if isinstance(value, ComputeConfig) else str(value)


def _from_plain(kind: type, value: object) -> object:
    """Only paths have no form of their own in JSON."""
    return kind(value)
