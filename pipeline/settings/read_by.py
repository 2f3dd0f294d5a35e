"""Which processes use a setting: the part of its declaration that pydantic has no place for."""

from dataclasses import dataclass

API = "API"
UPLOADS = "upload process"
PLANNER = "planner"
BEAT = "beat"
GPU_WORKER = "GPU worker"
TASK_RUNNER = "task runner"
FLOWER = "Flower"
COMMANDS = "commands"
RUN = "`nightjar run`"
TESTS = "tests"
COMPOSE = "docker compose"


@dataclass(frozen=True)
class ReadBy:
    """The processes that use a setting.

    Attributes:
        processes: Their names in docs/explanations/structure.md.
        page: The page below docs/ that says more, if there is one.
    """

    processes: tuple[str, ...]
    page: str = ""


def read_by(*processes: str, page: str = "") -> ReadBy:
    """Declare who uses a setting: `Annotated[int, read_by(PLANNER)]`."""
    return ReadBy(processes, page)


EVERY_PROCESS = read_by("every process", page="guides/monitoring.md")
CONNECTED = (API, UPLOADS, PLANNER, BEAT, GPU_WORKER, FLOWER)
"""The processes that reach the broker."""
