"""The page docs/reference/settings.md, made from the declarations."""

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from nightjar.pipeline.settings import PARTS
from nightjar.pipeline.settings.read_by import ReadBy
from nightjar.pipeline.settings.variables import OTHER_VARIABLES, PREFIX, Variable

_HEAD = """\
# Settings

This page is generated from the declarations in `pipeline/settings/`, and
`python -m nightjar.pipeline.settings` prints it.

A setting is an environment variable. A process reads its settings when it starts: change one, and
start again the processes that read it. Units are in the names: `_S` seconds, `_BYTES` bytes,
`_DAYS` days. A value that cannot be used is refused, with what may be written. So is a name that is
nearly a setting's. Any other unknown name is logged and ignored.

The [structure](../explanations/structure.md#the-processes) lists the processes. `nightjar run`
starts a planner, beat and a GPU worker of its own, with the same settings. `nightjar doctor` finds
settings that contradict each other.
"""
_COLUMNS = "| variable | type | default | read by | meaning |\n|---|---|---|---|---|\n"
_OTHERS = """
## Read elsewhere

These are read where they are used, without the checks of the settings.

| variable | default | read by | meaning |
|---|---|---|---|
"""
_TYPES: dict[object, str] = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    SecretStr: "secret",
}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def reference_page() -> str:
    """Return the page in Markdown."""
    return _HEAD + "".join(_sections()) + _OTHERS + "".join(_other_rows())


def read_by_of(field: FieldInfo) -> ReadBy:
    """Return who reads a setting.

    Raises:
        LookupError: Its declaration does not say.
    """
    found = [told for told in field.metadata if isinstance(told, ReadBy)]
    if len(found) != 1 or not field.description:
        raise LookupError(f"no readers or no description: {field}")
    return found[0]


def _sections() -> Iterator[str]:
    for part in PARTS:
        title = str(part.__doc__).partition("\n")[0].rstrip(".")
        rows = [_row(name, field) for name, field in part.model_fields.items()]
        yield f"\n## {title}\n\n{_COLUMNS}" + "".join(rows)


def _row(name: str, field: FieldInfo) -> str:
    readers = read_by_of(field)
    cells = (
        f"`{PREFIX}{name.upper()}`",
        _type(field),
        _shown(field.default),
        ", ".join(readers.processes),
        _meaning(str(field.description), readers),
    )
    return f"| {' | '.join(cells)} |\n"


def _other_rows() -> Iterator[str]:
    for name, variable in sorted(OTHER_VARIABLES.items()):
        yield f"| `{name}` | {' | '.join(_other_cells(variable))} |\n"


def _other_cells(variable: Variable) -> tuple[str, str, str]:
    return (
        _shown(variable.default),
        ", ".join(variable.readers.processes),
        _meaning(variable.meaning, variable.readers),
    )


def _type(field: FieldInfo) -> str:
    kind: Any = field.annotation
    if get_origin(kind) is UnionType:
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is Literal:
        *others, last = (f"`{choice}`" for choice in get_args(kind))
        return f"{', '.join(others)} or {last}"
    bounds = [
        f"{word} {_number(round(getattr(told, sign), 4))}"
        for told in field.metadata
        for sign, word in _BOUNDS.items()
        if getattr(told, sign, None) is not None
    ]
    lengths = [
        f"{told.min_length} characters or more"
        for told in field.metadata
        if getattr(told, "min_length", None)
    ]
    return ", ".join([_TYPES[kind], *bounds, *lengths])


def _shown(default: object) -> str:
    if isinstance(default, SecretStr):
        default = default.get_secret_value()
    if default is None or default == "":
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{_number(default)}`" if isinstance(default, float) else f"`{default}`"


def _number(value: float) -> str:
    return f"{value:.10g}"


def _meaning(text: str, readers: ReadBy) -> str:
    """The description, which is Markdown, and a link to the page that says more."""
    if not readers.page:
        return text
    title = Path(readers.page.partition("#")[0]).stem.replace("-", " ")
    return f"{text} ([{title}](../{readers.page}))"
