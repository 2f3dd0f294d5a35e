"""Training rows: read from JSON lines or Parquet, checked, and turned into token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nightjar.checkpoints import PROMPT_TOKEN, ModelDirectory
from nightjar.gpu_worker.tuning.options import TuneError

MOST_BYTES = 1 << 30
MOST_ROWS = 1_000_000
MOST_DOCUMENTS = 1000
_TOLD = 20

VECTOR = -1
"""Stands for a prompt vector among token ids."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """Token ids, VECTOR for each prompt vector; those from `scored_from` on are learned."""

    ids: list[int]
    scored_from: int

    @property
    def scored(self) -> int:
        """How many tokens are learned."""
        return len(self.ids) - self.scored_from


@dataclass(frozen=True, slots=True)
class Example:
    """One row: a text with its target, or a query with each of its documents.

    best: The index of the right document; None for a target.
    label: What must differ between rows, or there is nothing to tell apart.
    """

    sequences: list[Sequence]
    best: int | None
    label: str


@dataclass(slots=True)
class Rows:
    """The examples of a file, and what was wrong with the others."""

    examples: list[Example] = field(default_factory=list)
    bad: int = 0
    told: list[str] = field(default_factory=list)

    def refuse(self, message: str) -> None:
        """Count a row that cannot be used."""
        self.bad += 1
        if len(self.told) < _TOLD:
            self.told.append(message)


def read_rows(path: Path, directory: ModelDirectory, vectors: int) -> Rows:
    """Read the rows of a file; those that cannot be used are left out and told.

    A row is {"input", "target"}, or {"query", "documents", "best"} with the index of the right
    document. The vectors stand where `<|PROMPT|>` is written once, else before the text.

    Raises:
        TuneError: The file cannot be read, or no row can be used.
    """
    encoder = _RowEncoder(directory, vectors)
    found = Rows()
    kinds = set[bool]()
    for number, row in _records(path, found):
        try:
            example = encoder.example(row)
        except TuneError as error:
            found.refuse(f"{path}: row {number}: {error}")
            continue
        found.examples.append(example)
        kinds.add(example.best is None)
        if len(found.examples) > MOST_ROWS:
            raise TuneError(f"{path}: more than {MOST_ROWS} rows; give a part of them")
    if not found.examples:
        first = f"; the first: {found.told[0]}" if found.told else ""
        raise TuneError(f"{path}: no row can be used{first}")
    if len(kinds) > 1:
        raise TuneError(f"{path}: targets and rankings are mixed; train them one after another")
    return found


def check_classes(examples: list[Example]) -> None:
    """Raise TuneError where all rows ask for the same: there would be nothing to learn."""
    if len({example.label for example in examples}) < 2:
        what = "target" if examples[0].best is None else "best document"
        raise TuneError(
            f"all {len(examples)} rows have the same {what}: the vectors would learn to give it "
            "always; add rows of at least one other class"
        )


class _RowEncoder:
    """Turns rows into examples, with the checks of the planner."""

    def __init__(self, directory: ModelDirectory, vectors: int) -> None:
        self._tokenizer = directory.tokenizer()
        self._context = directory.config.context_length
        self._vectors = vectors
        eos = directory.config.eos_token_ids
        self._end = [eos[0]] if eos else []

    def example(self, row: dict[str, Any]) -> Example:
        if "query" in row or "documents" in row:
            return self._ranking(row)
        text, target = _text(row, "input"), _text(row, "target")
        if not target.strip():
            raise TuneError("target: it is empty; write what the model is to answer")
        ids = self._placed(text)
        return Example(
            [self._sequence("input", ids, self._encode(target) + self._end)], None, target
        )

    def _ranking(self, row: dict[str, Any]) -> Example:
        documents, best = row.get("documents"), row.get("best")
        if not isinstance(documents, list) or not 2 <= len(documents) <= MOST_DOCUMENTS:
            raise TuneError(f"documents: expected a list of 2 to {MOST_DOCUMENTS} texts")
        if not all(isinstance(one, str) and one.strip() for one in documents):
            raise TuneError("documents: each must be a text that is not empty")
        if type(best) is not int or not 0 <= best < len(documents):
            raise TuneError(f"best: expected the index of a document, 0 to {len(documents) - 1}")
        ids = self._placed(_text(row, "query"))
        made = [self._sequence("query", ids, self._encode(one)) for one in documents]
        return Example(made, best, documents[best])

    def _sequence(self, name: str, ids: list[int], target: list[int]) -> Sequence:
        length = len(ids) + len(target)
        if length > self._context:
            raise TuneError(
                f"{name}: {length} tokens with the vectors and what follows, but the model's "
                f"context is {self._context}; shorten it"
            )
        return Sequence(ids + target, len(ids))

    def _placed(self, text: str) -> list[int]:
        """Return the ids of a text, with the vectors where they belong."""
        pieces = text.split(PROMPT_TOKEN)
        if len(pieces) == 1:
            pieces = ["", text]
        if len(pieces) > 2:
            raise TuneError(f"{PROMPT_TOKEN} is written {len(pieces) - 1} times; write it once")
        before, after = map(self._encode, pieces)
        return [*self._tokenizer.prefix_ids, *before, *[VECTOR] * self._vectors, *after]

    def _encode(self, text: str) -> list[int]:
        (ids,) = self._tokenizer.encode_batch([text], self._context)
        return list(ids)


def _text(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise TuneError(f"{name}: expected a text")
    return value


def _records(path: Path, rows: Rows) -> Iterator[tuple[int, dict[str, Any]]]:
    """The records of a file with their numbers, from 1."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise TuneError(f"{path}: cannot be read: {error.strerror}") from error
    if size > MOST_BYTES:
        raise TuneError(f"{path}: larger than {MOST_BYTES >> 30} GiB; give a part of it")
    read: Callable[[Path, Rows], Iterator[tuple[int, Any]]]
    read = _parquet if path.suffix.lower() == ".parquet" else _json_lines
    for number, row in read(path, rows):
        if isinstance(row, dict):
            yield number, row
        else:
            rows.refuse(f"{path}: row {number}: expected an object")


def _json_lines(path: Path, rows: Rows) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except ValueError as error:  # also bytes that are no UTF-8
                rows.refuse(f"{path}: row {number}: no JSON: {error}")


def _parquet(path: Path, rows: Rows) -> Iterator[tuple[int, Any]]:
    del rows
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError as error:
        raise TuneError(
            f"{path}: reading Parquet needs pip install 'nightjar-batch[tables]'"
        ) from error
    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches(1024):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pa.ArrowException, OSError) as error:
        raise TuneError(f"{path}: no whole Parquet file: {error}") from error
