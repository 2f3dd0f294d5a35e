"""A sample of the rows of a file of results, with the lines that asked for them."""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightjar.pipeline.embedded.workdir import UsageError

MOST_ROWS = 1000
_LONGEST_LINE = 64 << 20


@dataclass(frozen=True, slots=True)
class SampledRow:
    """An answer of the file, and the line that asked for it."""

    custom_id: str
    body: dict[str, Any]
    line: bytes


@dataclass(frozen=True, slots=True)
class SampledRows:
    """rows: the sample.  of: successes in the file.  without_line: sampled rows whose line is not
    in the file of requests."""

    rows: list[SampledRow]
    of: int
    without_line: int


def sample_share(text: str) -> float:
    """Read a share such as `1%`, above 0 and at most 100%.

    Raises:
        UsageError: It is none.
    """
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = math.nan
    if not text.endswith("%") or not 0 < share <= 1:
        raise UsageError(f"--sample {text!r}: give a share such as 1%")
    return share


def sample_rows(results: Path, requests: Path, share: float) -> SampledRows:
    """Choose rows by a hash of their ids: the same ones each time, MOST_ROWS at most.

    Raises:
        UsageError: A file cannot be read, is of another format, or holds no success.
    """
    count = 0
    chosen: list[tuple[int, int, dict[str, Any]]] = []  # a heap: the largest hash comes first
    for number, row in _objects(results):
        response = row.get("response")
        if not isinstance(response, dict) or response.get("status_code") != 200:
            continue
        if not isinstance(row.get("custom_id"), str) or not isinstance(response.get("body"), dict):
            raise UsageError(f"{results}:{number}: no line of results: it has no custom_id or body")
        count += 1
        entry = -_order(row["custom_id"]), number, row
        if len(chosen) < MOST_ROWS:
            heapq.heappush(chosen, entry)
        else:
            heapq.heappushpop(chosen, entry)
    if not count:
        raise UsageError(f"{results} holds no success")
    wanted = min(MOST_ROWS, math.ceil(share * count))
    kept = [row for _, _, row in sorted(chosen, key=lambda entry: -entry[0])[:wanted]]
    bodies = {row["custom_id"]: row["response"]["body"] for row in kept}
    rows = [SampledRow(id_, bodies[id_], line) for id_, line in _lines(requests, bodies.keys())]
    if not rows:
        raise UsageError(f"{requests} holds none of the lines that {results} answers")
    return SampledRows(rows, count, len(bodies) - len(rows))


def results_by_id(path: Path) -> dict[str, dict[str, Any]]:
    """Return the bodies of the successes of a small file of results."""
    found = {}
    for _, row in _objects(path):
        response = row.get("response")
        if isinstance(response, dict) and response.get("status_code") == 200:
            found[str(row["custom_id"])] = response["body"]
    return found


def _order(custom_id: str) -> int:
    return int.from_bytes(hashlib.sha256(custom_id.encode()).digest()[:8], "big")


def _lines(path: Path, wanted: Container[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the lines with these ids, each once."""
    seen: set[str] = set()
    for _, raw in _raw_lines(path):
        try:
            row = json.loads(raw)
        except ValueError:
            continue  # it has no answer either
        custom_id = row.get("custom_id") if isinstance(row, dict) else None
        if isinstance(custom_id, str) and custom_id in wanted and custom_id not in seen:
            seen.add(custom_id)
            yield custom_id, raw


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, raw in _raw_lines(path):
        try:
            row = json.loads(raw)
        except ValueError as error:
            raise UsageError(f"{path}:{number}: no JSON: {error}") from error
        if not isinstance(row, dict):
            raise UsageError(f"{path}:{number}: no line of results: it is no object")
        yield number, row


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, numbered from 1."""
    try:
        with path.open("rb") as stream:
            number = 0
            while line := stream.readline(_LONGEST_LINE):
                number += 1
                if line.strip():
                    yield number, line.rstrip(b"\r\n")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
