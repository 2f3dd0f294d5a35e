"""Has a model's tensors read from disk before they are packed."""

from __future__ import annotations

from nightjar.checkpoints import ModelDirectory
from nightjar.checkpoints.disk import Range, ReadAhead


class TensorsAhead:
    """Has the tensors of a model read ahead by the beginnings of their names.

    Args:
        directory: The model's.
        ahead: Reads them.
    """

    def __init__(self, directory: ModelDirectory, ahead: ReadAhead) -> None:
        self._ahead = ahead
        spans = {header.path: header.spans() for header in directory.headers}
        self._places: dict[str, Range] = {
            name: (found.path, *spans[found.path][found.stored_name])
            for name, found in directory.tensors.items()
        }
        self._asked: set[str] = set()

    def expect(self, beginning: str) -> None:
        """Say that all tensors whose names begin so are needed soon; each is asked for once."""
        named = {name for name in self._places if name.startswith(beginning)} - self._asked
        self._asked |= named
        self._ahead.ask(sorted(self._places[name] for name in named))
