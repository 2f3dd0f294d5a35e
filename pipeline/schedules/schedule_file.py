"""Reads a schedule file (TOML or YAML) and checks it; errors name the line and the field."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nightjar.jobs.schedule_records import Definition
from nightjar.jobs.schedules.fields import (
    NAME,
    Finding,
    ScheduleFields,
    check_name,
    findings,
)
from nightjar.pipeline.written_file import WrittenFileError, read_written

MOST_SCHEDULES = 100
_MOST_TOLD = 5
_TABLE = "schedules"
_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?")
_KEY = re.compile(r"""\s*["']?([\w-]+)["']?\s*=""")


class ScheduleFileError(Exception):
    """A schedule file cannot be used; the message names the line and the field."""


@dataclass(frozen=True, slots=True)
class ScheduleFile:
    """The schedules of a file, by their names."""

    path: Path
    schedules: Mapping[str, Definition]


def read_schedules(path: Path) -> ScheduleFile:
    """Read a schedule file; paths of tasks in it are relative to its folder.

    Raises:
        ScheduleFileError: The file cannot be read, or a field of it is wrong.
    """
    try:
        written = read_written(path, "schedule file")
    except WrittenFileError as error:
        raise ScheduleFileError(str(error)) from error
    text, values = written.text, written.values
    found = values.get(_TABLE) if isinstance(values, dict) else None
    if not isinstance(found, dict) or not found:
        raise ScheduleFileError(f"{path} holds no schedules; write [schedules.NAME] and its fields")
    problems = [
        _problem(path, text, (name,), "is not a table of a schedule file; write [schedules.NAME]")
        for name in values
        if name != _TABLE
    ]
    if len(found) > MOST_SCHEDULES:
        problems.append(f"{path}: has {len(found)} schedules; a file has at most {MOST_SCHEDULES}")
    schedules = {}
    for name, fields in found.items():
        try:
            schedules[str(name)] = _definition(path, str(name), fields)
        except _FaultError as fault:
            problems += [
                _problem(path, text, (_TABLE, str(name), *place), message)
                for place, message in fault.found
            ]
    if problems:
        more = f"\n  and {len(problems) - _MOST_TOLD} more" if len(problems) > _MOST_TOLD else ""
        lines = "".join(f"\n  {line}" for line in problems[:_MOST_TOLD])
        raise ScheduleFileError(f"{path} cannot be used:{lines}{more}")
    return ScheduleFile(path.resolve(), schedules)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of schedule files, for editors."""
    schedule = ScheduleFields.model_json_schema()
    definitions = schedule.pop("$defs", {})
    named = {f"^{NAME.pattern}$": schedule}
    tables = {"type": "object", "patternProperties": named, "additionalProperties": False}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Nightjar schedule file",
        "type": "object",
        "properties": {_TABLE: {**tables, "minProperties": 1, "maxProperties": MOST_SCHEDULES}},
        "required": [_TABLE],
        "additionalProperties": False,
        "$defs": definitions,
    }


class _FaultError(Exception):
    """What is wrong with one schedule: the place of each fault, and a message."""

    def __init__(self, found: Sequence[Finding]) -> None:
        super().__init__()
        self.found = found


def _definition(path: Path, name: str, fields: object) -> Definition:
    try:
        check_name(name)
    except ValueError as error:
        raise _FaultError([((), str(error))]) from error
    if not isinstance(fields, dict):
        raise _FaultError([((), "is not a table of fields")])
    try:
        checked = ScheduleFields.model_validate(fields)
    except ValidationError as error:
        raise _FaultError(findings(error)) from None
    return checked.definition_of_operator(path.resolve().parent)


def _problem(path: Path, text: str, place: tuple[str, ...], message: str) -> str:
    line = _line_of(path, text, place)
    told = f"line {line}, " if line else ""
    return f"{told}{'.'.join(place)}: {message}"


def _line_of(path: Path, text: str, place: tuple[str, ...]) -> int | None:
    """The line of a field, or of the nearest table around it; None where it cannot be told."""
    lines = _toml_lines(text) if path.suffix.lower() == ".toml" else _yaml_lines(text)
    for length in range(len(place), 0, -1):
        if place[:length] in lines:
            return lines[place[:length]]
    return None


def _toml_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line of each table and key, as far as they begin a line of their own."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.fullmatch(line):
            table = tuple(part.strip().strip("\"'") for part in header[1].split("."))
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            found.setdefault((*table, key[1]), number)
    return found


def _yaml_lines(text: str) -> dict[tuple[str, ...], int]:
    import yaml  # noqa: PLC0415 - in an extra; the file was read with it

    found: dict[tuple[str, ...], int] = {}

    def add(node: yaml.Node | None, before: tuple[str, ...]) -> None:
        if not isinstance(node, yaml.MappingNode) or len(before) > 2:
            return
        for key, value in node.value:
            place = (*before, str(key.value))
            found.setdefault(place, key.start_mark.line + 1)
            add(value, place)

    add(yaml.compose(text, Loader=yaml.SafeLoader), ())
    return found
