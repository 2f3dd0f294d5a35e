"""Reads a task file (TOML or YAML) and checks it."""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from nightjar.pipeline.tasks.errors import TaskError
from nightjar.pipeline.tasks.fields import ChatTask, GenerateTask, RankTask, ScoreTask, Task
from nightjar.pipeline.written_file import WrittenFileError, read_written

_MOST_TOLD = 5
_TASK: TypeAdapter[Task] = TypeAdapter(Annotated[Task, Field(discriminator="kind")])
_MODELS: dict[str, type[BaseModel]] = {
    "generate": GenerateTask,
    "chat": ChatTask,
    "rank": RankTask,
    "score": ScoreTask,
}
# Of the answers; the model and the vectors are compared by their content.
_DECIDES_NOTHING = {"model", "prompt_vectors", "reuse_results"}
# Parts of pydantic's places that are no names of the file: which type of a union was tried.
_INNER = {*_MODELS, "str", "int", "constrained-str", "constrained-int", "Jinja", "Column"}
_INNER |= {"CsvFiles", "SinkConfig"}


@dataclass(frozen=True, slots=True)
class TaskFile:
    """A task with the place of its file; paths in it are relative to that folder."""

    path: Path
    task: Task

    @property
    def folder(self) -> Path:
        """The folder of the file."""
        return self.path.resolve().parent

    def parts(self) -> dict[str, str]:
        """Return what the file says, table by table, to find out later what has changed."""
        values = self.task.model_dump(mode="json", exclude=_DECIDES_NOTHING)
        return {
            f"the task's {name}": json.dumps(value, sort_keys=True, ensure_ascii=False)
            for name, value in values.items()
        }


def read_task(path: Path) -> TaskFile:
    """Read a task file.

    Raises:
        TaskError: The file cannot be read, or a field of it is wrong.
    """
    try:
        written = read_written(path, "task file")
    except WrittenFileError as error:
        raise TaskError(str(error)) from error
    return TaskFile(path, check_task(written.values, str(path)))


def check_task(values: object, name: str) -> Task:
    """Return the task that these values describe.

    Raises:
        TaskError: A field is wrong; the message lists the first few.
    """
    if not isinstance(values, dict):
        raise TaskError(f"{name} holds no fields; write kind, [source] and [request]")
    try:
        return _TASK.validate_python(values)
    except ValidationError as error:
        # Without input: a URL may hold a secret.
        found = error.errors(include_url=False, include_input=False, include_context=True)
        told = list(dict.fromkeys(_told(one, values) for one in _likeliest(found)))
        more = f"\n  and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
        lines = "".join(f"\n  {line}" for line in told[:_MOST_TOLD])
        raise TaskError(f"{name} cannot be used:{lines}{more}") from None


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of task files, for editors."""
    schema = _TASK.json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Nightjar task file",
        **schema,
    }


def _likeliest(found: Iterable[Any]) -> list[Any]:
    """Leave out what is said of the other types of a union, where one of them has a better word."""
    errors = list(found)
    deepest: dict[tuple[str, ...], int] = {}
    for one in errors:
        place = _names(one["loc"])
        for length in range(len(place)):
            deepest[place[:length]] = max(deepest.get(place[:length], 0), len(place))
    return [one for one in errors if deepest.get(_names(one["loc"]), 0) <= len(_names(one["loc"]))]


def _names(place: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return a place without the words of pydantic that are no names of the file."""
    return tuple(
        str(part)
        for index, part in enumerate(place)
        if not (isinstance(part, str) and _is_inner(part, index))
    )


def _is_inner(part: str, index: int) -> bool:
    if index == 0:
        return part in _MODELS
    return part in _INNER or part.endswith("]")


def _told(error: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Return what is wrong with a field, and how to mend it."""
    place = _names(error["loc"])
    kind = str(values.get("kind"))
    if error["type"].startswith("union_tag"):
        return f"kind: give one of {', '.join(_MODELS)}"
    name = ".".join(place) or "the file"
    if error["type"] == "extra_forbidden":
        return f"{name}: is not a field here; {_near(place, kind)}"
    if error["type"] == "missing":
        return f"{name}: is missing; give it"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{name}: {message[:1].lower()}{message[1:]}"


def _near(place: tuple[str, ...], kind: str) -> str:
    """Say which field was meant, as far as the name tells."""
    known: set[str] = set()
    model = _MODELS[kind]
    tables: list[Any] = [model, *(field.annotation for field in model.model_fields.values())]
    for table in tables:
        known |= set(getattr(table, "model_fields", {}))
    near = difflib.get_close_matches(place[-1], sorted(known), n=1)
    return f"did you mean {near[0]}?" if near else "leave it out"
