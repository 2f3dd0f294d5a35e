"""Prompts made of a row's columns: names in braces, and nothing else of Python's formats."""

import string
from collections.abc import Mapping

from nightjar.pipeline.client.errors import RequestError


class Template:
    """A text with columns in braces; `{{` and `}}` are braces themselves.

    Raises:
        RequestError: The text has no column, or asks for more than a column's value.
    """

    def __init__(self, text: str) -> None:
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise RequestError(
                f"template: {error}; write {{column}}, and {{{{ and }}}} for braces themselves"
            ) from error
        self._parts = [(literal, name) for literal, name, _, _ in parts]
        self.columns = frozenset(name for _, name in self._parts if name is not None)
        for _, name, form, conversion in parts:
            if name is None:
                continue
            if form or conversion or not name or any(mark in name for mark in ".[]"):
                raise RequestError(
                    f"template: {{{name}}} is more than the name of a column; prepare the value "
                    "in a column of its own"
                )
        if not self.columns:
            raise RequestError("template: names no column; write {column} where its value belongs")

    def fill(self, row: Mapping[str, object]) -> str | None:
        """Return the text of a row; None where a value is null."""
        pieces = []
        for literal, name in self._parts:
            pieces.append(literal)
            if name is not None:
                value = row[name]
                if value is None:
                    return None
                pieces.append(str(value))
        return "".join(pieces)
