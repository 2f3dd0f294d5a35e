"""Templates: from the values of a row to a text.

A plain template knows names of columns and nothing else: `{review}`, with `{{` for a brace. Jinja
is there for loops and conditions, in its sandbox.
"""

import datetime
import decimal
import itertools
from collections.abc import Iterable, Iterator, Mapping
from string import Formatter
from typing import Any, Protocol

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nightjar.jobs.lines.parsing import MAX_LINE_BYTES
from nightjar.pipeline.tasks.errors import RowFaultError, TaskError
from nightjar.pipeline.tasks.fields import Jinja
from nightjar.pipeline.tasks.fields import Template as TemplateField

Row = Mapping[str, Any]

_HIGHEST_POWER = 64
MOST_TURNS = 1_000_000
_TURNS = "nightjar_turns"


class Template(Protocol):
    """A compiled template."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it names."""

    @property
    def is_plain(self) -> bool:
        """Whether each column must hold single values; lists need Jinja."""

    def render(self, row: Row) -> str:
        """Return the text of a row; raises RowFaultError."""


def compile_template(given: TemplateField, field: str) -> Template:
    """Compile a template; `field` is its place in the task file.

    Raises:
        TaskError: It is not a template, or reaches into attributes.
    """
    return _Jinja(given, field) if isinstance(given, Jinja) else _Plain(given, field)


def text_of(value: object, column: str) -> str:
    """Return a value as text; raises RowFaultError."""
    if isinstance(value, str):
        return value
    if value is None:
        raise RowFaultError(column, "is null; give it a value in [request.defaults]")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float, decimal.Decimal)):
        return str(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    raise RowFaultError(column, f"holds a {type(value).__name__}, which is no text")


class _Plain:
    is_plain = True

    def __init__(self, given: str, field: str) -> None:
        parts: list[tuple[str, str | None]] = []
        try:
            for literal, name, spec, conversion in Formatter().parse(given):
                if name is not None:
                    _check_name(name, spec, conversion, field)
                parts.append((literal, name))
        except ValueError as error:
            raise TaskError(f"{field}: {error}; write {{{{ and }}}} for braces") from error
        self._parts = parts
        self.columns = tuple(dict.fromkeys(name for _, name in parts if name is not None))

    def render(self, row: Row) -> str:
        """Join the literal parts and the columns."""
        texts = []
        for literal, name in self._parts:
            texts.append(literal)
            if name is not None:
                value = row[name]
                texts.append(value if type(value) is str else text_of(value, name))
        return "".join(texts)


def _check_name(name: str, spec: str | None, conversion: str | None, field: str) -> None:
    if not name:
        raise TaskError(f"{field}: {{}} names no column; write {{name}}, or {{{{}}}} for braces")
    if spec or conversion:
        raise TaskError(
            f"{field}: {{{name}}} has a format after the name, which is not supported; write "
            f"{{{name}}}, or use jinja"
        )


class _Environment(ImmutableSandboxedEnvironment):
    # One short expression must not fill the memory before the output is measured.
    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(
        self,
        context: jinja2.runtime.Context,
        operator: str,
        left: Any,  # noqa: ANN401
        right: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Compute with numbers only."""
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if not numbers or (operator == "**" and max(abs(left), abs(right)) > _HIGHEST_POWER):
            raise SecurityError(f"{operator} is for numbers")
        return super().call_binop(context, operator, left, right)


def _finalize(value: object) -> object:
    if value is None:
        raise RowFaultError(
            None, "the jinja template writes a null; test it, or give [request.defaults]"
        )
    return value


class _Jinja:
    is_plain = False

    def __init__(self, given: Jinja, field: str) -> None:
        environment = _Environment(
            undefined=jinja2.StrictUndefined, finalize=_finalize, keep_trailing_newline=True
        )
        environment.globals.pop("lipsum")
        for name in ("center", "format"):  # they make long texts of short ones
            environment.filters.pop(name)
        try:
            tree = environment.parse(given.jinja)
            environment.from_string(given.jinja)
        except jinja2.TemplateError as error:
            raise TaskError(f"{field}: the jinja template is not valid: {error}") from error
        for node in tree.find_all(nodes.Getattr):
            if node.attr.startswith("_"):
                raise TaskError(
                    f"{field}: the jinja template reaches into {node.attr}; take it out"
                )
        if any(tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends))):
            raise TaskError(f"{field}: the jinja template loads another one; write it as one")
        names = meta.find_undeclared_variables(tree) - environment.globals.keys()
        self.columns = tuple(sorted(names))
        self._template = environment.from_string(_with_counted_loops(environment, tree))

    def render(self, row: Row) -> str:
        """Render the template; the text is bounded."""
        values = {name: row[name] for name in self.columns}
        values[_TURNS] = itertools.count(1)
        try:
            return "".join(_within(self._template.generate(values)))
        except RowFaultError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a template's own code raises
            # The type alone: the text of such an error may hold a row's values.
            told = error.message if isinstance(error, jinja2.UndefinedError) else None
            said = told or type(error).__name__
            raise RowFaultError(None, f"the jinja template fails on this row: {said}") from None


def _with_counted_loops(environment: _Environment, tree: nodes.Template) -> nodes.Template:
    """Count the turns of all loops of a template together, so that nested ones have a bound."""
    environment.filters[_TURNS] = _counted
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, _TURNS, [], [], None, None, lineno=loop.lineno)
    return tree


@jinja2.pass_context
def _counted(context: jinja2.runtime.Context, items: Iterable[object]) -> Iterator[object]:
    turns = context.resolve(_TURNS)
    for item in items:
        if next(turns) > MOST_TURNS:
            raise RowFaultError(
                None, f"the loops of the jinja template turn more than {MOST_TURNS} times"
            )
        yield item


def _within(pieces: Iterable[str]) -> Iterator[str]:
    """Yield pieces of text until they are too many."""
    left = MAX_LINE_BYTES
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise RowFaultError(
                None, f"the jinja template writes more than {MAX_LINE_BYTES} characters"
            )
        yield piece
