"""Names of `NIGHTJAR_*` environment variables: which exist, and what an unknown one may mean."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from nightjar.pipeline.settings.read_by import (
    COMMANDS,
    COMPOSE,
    FLOWER,
    GPU_WORKER,
    TESTS,
    ReadBy,
    read_by,
)

PREFIX = "NIGHTJAR_"


@dataclass(frozen=True)
class Variable:
    """A variable that is read outside Settings.

    Attributes:
        readers: Who reads it.
        meaning: What it does, and what holds without it.
        default: What it is unless given.
    """

    readers: ReadBy
    meaning: str
    default: str = ""


OTHER_VARIABLES = {
    "NIGHTJAR_API": Variable(
        read_by(COMMANDS, page="guides/python-client.md"),
        "where the Python client and the client commands find the API",
        "http://127.0.0.1:8000",
    ),
    "NIGHTJAR_FLOWER_AUTH": Variable(
        read_by(FLOWER, page="guides/monitoring.md"), "`USER:PASSWORD` of Flower"
    ),
    "NIGHTJAR_CPU_KERNELS": Variable(
        read_by(GPU_WORKER, page="explanations/kernels.md#on-the-cpu"),
        "`native`, `torch`, or `auto`: native where a compiler is there",
        "auto",
    ),
    "NIGHTJAR_KERNEL_CACHE": Variable(
        read_by(GPU_WORKER),
        "folder of compiled kernels; by default `nightjar` under `XDG_CACHE_HOME` or `~/.cache`",
    ),
    "NIGHTJAR_PREBUILT_KERNELS": Variable(
        read_by(GPU_WORKER), "folder of CUDA kernels that were compiled on another machine"
    ),
    "NIGHTJAR_MODEL_DIR": Variable(
        read_by(COMPOSE), "in `.env`: the model directory on the host; by default the demo model"
    ),
    "NIGHTJAR_TASK_DIR": Variable(
        read_by(COMPOSE), "in `.env`: the folder of task files on the host; by default `tasks`"
    ),
    "NIGHTJAR_COMPUTE_SANITIZER": Variable(
        read_by(TESTS),
        "the program compute-sanitizer for the tests on a GPU; `none` leaves its tests out",
    ),
    "NIGHTJAR_TEST_POSTGRES": Variable(
        read_by(TESTS), "a PostgreSQL server for the tests, in place of one that they start"
    ),
}
"""Variables that are read outside Settings."""

# The test suite's own: NIGHTJAR_TEST_POSTGRES and others.
_TESTS = "NIGHTJAR_TEST_"
_LIKE = 0.85


def unknown_variables(
    environment: Iterable[str], fields: Collection[str]
) -> list[tuple[str, str | None]]:
    """Return each unknown variable, with the known name that it resembles or None.

    fields: the names of the settings, without the prefix.
    """
    known = {name.removeprefix(PREFIX) for name in OTHER_VARIABLES}
    known |= {field.upper() for field in fields}
    found: list[tuple[str, str | None]] = []
    for name in sorted(environment):
        given = name.removeprefix(PREFIX)
        if not name.startswith(PREFIX) or name.startswith(_TESTS) or given in known:
            continue
        like = get_close_matches(given, known, n=1, cutoff=_LIKE)
        found.append((name, PREFIX + like[0] if like else None))
    return found
