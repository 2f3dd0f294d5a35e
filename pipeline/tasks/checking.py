"""Checks that a task and the columns of its source fit together, before any row is read."""

import difflib
from collections.abc import Iterator

import pyarrow as pa

from nightjar.pipeline.tables.keys import Keys, KeyTypeError
from nightjar.pipeline.tables.sources.values import build, words
from nightjar.pipeline.tasks.errors import TaskError
from nightjar.pipeline.tasks.fields import ChatTask, Column, RankTask, Task
from nightjar.pipeline.tasks.requests import Requests
from nightjar.pipeline.tasks.templates import Template, compile_template

_MOST_NAMES = 20


def check_columns(task: Task, requests: Requests, schema: pa.Schema) -> Keys:
    """Return the keys of the task's rows.

    Raises:
        TaskError: A column is missing, or holds what its place in the task cannot use.
    """
    _check_names(task, requests, schema)
    _check_preparing(task, schema)
    for template in requests.templates:
        if template.is_plain:
            for name in template.columns:
                _check_single(name, schema.field(name).type)
    if isinstance(task, RankTask):
        _check_documents(task, schema)
    if isinstance(task, ChatTask) and isinstance(task.request.messages, Column):
        _check_messages(task.request.messages.column, schema)
    try:
        return Keys(pa.schema([schema.field(name) for name in task.source.key]))
    except KeyTypeError as error:
        raise TaskError(f"[source] key: {error}") from error


def _check_names(task: Task, requests: Requests, schema: pa.Schema) -> None:
    for place, name in _named(task, requests):
        if name not in schema.names:
            raise TaskError(f"{place}: {_unknown(name, schema)}")
        if schema.names.count(name) > 1:
            raise TaskError(f"{place}: the source has two columns {name!r}; rename one of them")


def _check_preparing(task: Task, schema: pa.Schema) -> None:
    for name, value in task.request.defaults.items():
        if build([value], schema.field(name).type)[1]:
            held = words(schema.field(name).type)
            raise TaskError(f"[request] defaults: the column {name!r} holds {held}; give such one")
    for name in (*task.request.clean, *(one.column for one in task.request.crop)):
        if not _has_texts(schema.field(name).type):
            held = words(schema.field(name).type)
            raise TaskError(f"[request] clean and crop: the column {name!r} holds {held}, no texts")


def _named(task: Task, requests: Requests) -> Iterator[tuple[str, str]]:
    """Yield each column that the task names, with the place where it does."""
    yield from (("[source] key", name) for name in task.source.key)
    yield from (("[source] content", name) for name in task.source.content or ())
    yield from (("[request]", name) for name in requests.columns)
    yield from (("[request] defaults", name) for name in task.request.defaults)
    yield from (("[request] clean", name) for name in task.request.clean)
    yield from (("[request] crop", one.column) for one in task.request.crop)


def _unknown(name: str, schema: pa.Schema) -> str:
    if "." in name or "[" in name:
        outer = name.replace("[", ".").partition(".")[0]
        if outer in schema.names:
            return (
                f"{{{name}}} reaches into the column {outer!r}; plain templates take whole "
                "columns: use jinja for what is inside"
            )
    near = difflib.get_close_matches(name, schema.names, n=1)
    names = ", ".join(schema.names[:_MOST_NAMES])
    more = ", ..." if len(schema.names) > _MOST_NAMES else ""
    meant = f"did you mean {near[0]!r}? The source" if near else "it"
    return f"the source has no column {name!r}; {meant} has {names}{more}"


def _check_single(name: str, found: pa.DataType) -> None:
    nested = pa.types.is_nested(found)
    binary = pa.types.is_binary(found) or pa.types.is_large_binary(found)
    if nested or binary or pa.types.is_fixed_size_binary(found):
        mend = "use jinja to write it as text" if nested else "decode it into a column of texts"
        raise TaskError(
            f"[request]: the column {name!r} holds {words(found)}, which is no single text; {mend}"
        )


def _has_texts(found: pa.DataType) -> bool:
    if pa.types.is_list(found):
        return _has_texts(found.value_type)
    if pa.types.is_struct(found):
        return any(_has_texts(one.type) for one in found)
    return bool(pa.types.is_string(found))


def _check_documents(task: RankTask, schema: pa.Schema) -> None:
    given = task.request.documents
    found = schema.field(given.column).type
    place = "[request] documents"
    if not pa.types.is_list(found):
        raise TaskError(
            f"{place}: the column {given.column!r} holds {words(found)}; it must hold lists of "
            "texts or of structs"
        )
    each = None if given.each is None else compile_template(given.each, f"{place}.each")
    if pa.types.is_struct(found.value_type):
        _check_each(place, each, [one.name for one in found.value_type])
        return
    if not pa.types.is_string(found.value_type):
        raise TaskError(
            f"{place}: the column {given.column!r} holds {words(found)}; its lists must hold "
            "texts or structs"
        )
    if each is not None:
        _check_each(place, each, ["text"])


def _check_each(place: str, each: Template | None, names: list[str]) -> None:
    if each is None:
        if "text" in names:
            return  # as in Cohere's API
        raise TaskError(
            f"{place}: the lists hold structs; say with `each` how one becomes a text, such as "
            f'each = "{{{names[0] if names else "name"}}}"'
        )
    for name in each.columns:
        if name not in names:
            raise TaskError(f"{place}.each: there is no {name!r}; there are {', '.join(names)}")


def _check_messages(name: str, schema: pa.Schema) -> None:
    found = schema.field(name).type
    listed = pa.types.is_list(found) and pa.types.is_struct(found.value_type)
    if not (listed or pa.types.is_string(found)):
        raise TaskError(
            f"[request] messages: the column {name!r} holds {words(found)}; it must hold lists of "
            "structs with role and content, or such lists as JSON"
        )
