"""From the values of a row to the body of a request, by the task's kind."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from pydantic import BaseModel

from nightjar.jobs.lines.bodies import ChatBody, CompletionBody, RerankBody
from nightjar.jobs.lines.parsing import BodyError, validate_body
from nightjar.jobs.records import JsonObject
from nightjar.jobs.states import RequestKind
from nightjar.pipeline.tasks.errors import RowFaultError, TaskError
from nightjar.pipeline.tasks.fields import (
    Column,
    GenerateTask,
    Message,
    RankTask,
    ScoreTask,
    Task,
)
from nightjar.pipeline.tasks.templates import Row, Template, compile_template

_NAMED = {"prompt_vector", "adapter"}
_CONTENT = {"prompt", "messages", "query", "documents", "model", "content_key"} | _NAMED
_CHAT_NAMES = {"max_completion_tokens", "top_logprobs"}
_BODIES: dict[str, type[BaseModel]] = {
    "generate": CompletionBody,
    "chat": ChatBody,
    "rank": RerankBody,
    "score": RerankBody,
}


class _Content(Protocol):
    """The part of a body that holds the texts."""

    @property
    def templates(self) -> list[Template]: ...

    @property
    def columns(self) -> tuple[str, ...]: ...

    def of(self, row: Row) -> JsonObject: ...


class Requests:
    """Makes the checked bodies of a task's requests.

    Attributes:
        kind: Of all requests.
        is_chat: Whether they have messages.
        templates: All templates, to be checked against the columns.
        columns: All columns that bodies are made of.

    Raises:
        TaskError: A template or a parameter is wrong.
    """

    def __init__(self, task: Task) -> None:
        self._content = _content(task)
        self.is_chat = task.kind == "chat"
        ranks = task.kind in ("rank", "score")
        self.kind = RequestKind.RANK if ranks else RequestKind.GENERATE
        self._constants, self._from_columns = _parameters(task)
        self.templates = self._content.templates
        named = [name for template in self.templates for name in template.columns]
        named += [*self._content.columns, *self._from_columns.values()]
        self.columns = tuple(dict.fromkeys(named))
        self._check_constants()

    def body(self, row: Row) -> JsonObject:
        """Return the body of one row, checked as the body of a JSON line is.

        Raises:
            RowFaultError: A column of the row is at fault.
            BodyError: The body as a whole is.
        """
        body = self._content.of(row) | self._constants
        for field, column in self._from_columns.items():
            body[field] = row[column]
        return validate_body(self.kind, body, chat=self.is_chat)

    def column_of(self, param: str | None) -> str | None:
        """Return the column that a field of the body comes from, if it comes from one alone."""
        field = (param or "").removeprefix("body.").partition("[")[0]
        if field in self._from_columns:
            return self._from_columns[field]
        if field in ("messages", "documents") and len(self._content.columns) == 1:
            return self._content.columns[0]
        return None

    def _check_constants(self) -> None:
        """Find a parameter that no row could be sent with."""
        if self._from_columns.keys() - _NAMED:
            return  # a row's own value may belong to it
        body: JsonObject = {"prompt": "x"}
        if self.is_chat:
            body = {"messages": [{"role": "user", "content": "x"}]}
        elif self.kind is RequestKind.RANK:
            body = {"query": "x", "documents": ["x"]}
        try:
            validate_body(self.kind, body | self._constants, chat=self.is_chat)
        except BodyError as error:
            field = (error.param or "").removeprefix("body.")
            place = field if field in _NAMED else f"[parameters] {field}"
            raise TaskError(f"{place}: {error.message}") from None


def _parameters(task: Task) -> tuple[JsonObject, dict[str, str]]:
    """Return the fields that are the same in each body, and the columns of the others."""
    known = set(_BODIES[task.kind].model_fields) - _CONTENT
    known |= _CHAT_NAMES if task.kind == "chat" else set()
    constants: JsonObject = {}
    columns: dict[str, str] = {}
    for name, value in task.parameters.items():
        if name not in known:
            raise TaskError(
                f"[parameters] {name}: is no parameter of kind {task.kind!r}; there are "
                f"{', '.join(sorted(known))}"
            )
        if isinstance(value, dict) and value.keys() == {"column"}:
            columns[name] = str(value["column"])
        else:
            constants[name] = value
    for name in sorted(_NAMED):
        named: str | Column | None = getattr(task, name)
        if isinstance(named, Column):
            columns[name] = named.column
        elif named is not None:
            constants[name] = named
    return constants, columns


def _content(task: Task) -> _Content:
    if isinstance(task, GenerateTask):
        return _Prompt(task)
    if isinstance(task, ScoreTask):
        return _Score(task)
    if isinstance(task, RankTask):
        return _Ranking(task)
    given = task.request.messages
    return _MessageColumn(given) if isinstance(given, Column) else _Messages(given)


class _Prompt:
    columns = ()

    def __init__(self, task: GenerateTask) -> None:
        self._prompt = compile_template(task.request.prompt, "[request] prompt")
        self.templates = [self._prompt]

    def of(self, row: Row) -> JsonObject:
        return {"prompt": self._prompt.render(row)}


class _Score:
    columns = ()

    def __init__(self, task: ScoreTask) -> None:
        self._prompt = compile_template(task.request.prompt, "[request] prompt")
        self._text = compile_template(task.request.text, "[request] text")
        self.templates = [self._prompt, self._text]

    def of(self, row: Row) -> JsonObject:
        return {"query": self._prompt.render(row), "documents": [self._text.render(row)]}


class _Messages:
    columns = ()

    def __init__(self, given: Sequence[Message]) -> None:
        self._messages = [
            (one.role, compile_template(one.content, f"[request] messages[{number}].content"))
            for number, one in enumerate(given)
        ]
        self.templates = [template for _, template in self._messages]

    def of(self, row: Row) -> JsonObject:
        messages = [{"role": role, "content": one.render(row)} for role, one in self._messages]
        return {"messages": messages}


class _MessageColumn:
    def __init__(self, given: Column) -> None:
        self.columns = (given.column,)
        self.templates: list[Template] = []

    def of(self, row: Row) -> JsonObject:
        value = _given(row, self.columns[0])
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                raise RowFaultError(
                    self.columns[0], 'is not JSON; write a list of {"role": ..., "content": ...}'
                ) from None
        return {"messages": value}


class _Ranking:
    def __init__(self, task: RankTask) -> None:
        self._query = compile_template(task.request.query, "[request] query")
        given = task.request.documents
        self.templates = [self._query]
        self.columns = (given.column,)
        self._each = None
        if given.each is not None:
            self._each = compile_template(given.each, "[request] documents.each")

    @property
    def each(self) -> Template | None:
        return self._each

    def of(self, row: Row) -> JsonObject:
        documents = _given(row, self.columns[0])
        if self._each is not None and isinstance(documents, list):
            documents = [
                self._document(self._each, one, number) for number, one in enumerate(documents)
            ]
        return {"query": self._query.render(row), "documents": documents}

    def _document(self, each: Template, given: object, number: int) -> str:
        values: Mapping[str, Any] = given if isinstance(given, dict) else {"text": given}
        try:
            return each.render(values)
        except RowFaultError as error:
            name = f", {error.column}" if error.column else ""
            raise RowFaultError(
                self.columns[0], f"document {number}{name}: {error.reason}"
            ) from None


def _given(row: Row, column: str) -> Any:  # noqa: ANN401 - whatever the column holds
    value = row[column]
    if value is None:
        raise RowFaultError(column, "is null; give it a value in [request.defaults]")
    return value
