"""Which rows of a fused query-key-value projection belong to which head.

The order of the rows differs between versions (H: heads of one rank, D: channels of a head):

- "parts": [3, H, D], checkpoint version 0, and FasterTransformer
- "channels": [H, D, 3], version 1.0
- "heads": [H, 3, D], version 2.0 and later
- "groups": [G, H / G + 2, D], grouped queries: the queries of a group, its key, its value

Each rank has its own heads in its own order, so rows are sorted rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from nightjar.checkpoints.convert.arrays import Piece, Run, StoredArray

RowOrder = Literal["parts", "channels", "heads", "groups"]
Role = Literal["query", "key", "value"]
ROLES: tuple[Role, ...] = ("query", "key", "value")


@dataclass(frozen=True, slots=True)
class FusedRows:
    """The rows of one rank.

    heads, kv_heads: of this rank.  pairs: how many channels of a head rotate as neighbours, and are
    sorted into halves; 0 where they rotate as halves already.
    """

    order: RowOrder
    heads: int
    kv_heads: int
    head_size: int
    pairs: int = 0

    @property
    def rows(self) -> int:
        """How many rows a rank has."""
        return (self.heads + 2 * self.kv_heads) * self.head_size

    def count(self, role: Role) -> int:
        """How many heads of a role a rank has."""
        return self.heads if role == "query" else self.kv_heads

    def run(self, role: Role, head: int, to: int) -> Iterator[Run]:
        """Yield the runs that bring one head's rows to the rows from `to`."""
        start, step = self._start(role, head)
        for run in head_runs(self.head_size, self.pairs if role != "value" else 0):
            yield Run(start + run.start * step, run.count, to + run.to, run.step * step)

    def _start(self, role: Role, head: int) -> tuple[int, int]:
        """Return a head's first row, and the distance between its rows."""
        size, part = self.head_size, ROLES.index(role)
        if self.order == "parts":
            return (part * self.heads + head) * size, 1
        if self.order == "channels":
            return head * size * 3 + part, 3
        if self.order == "heads":
            return (head * 3 + part) * size, 1
        in_group = self.heads // self.kv_heads
        if role == "query":
            group, within = divmod(head, in_group)
        else:
            group, within = head, in_group + part - 1
        return (group * (in_group + 2) + within) * size, 1


def head_runs(head_size: int, pairs: int) -> Iterator[Run]:
    """Yield the runs that sort one head's channels: neighbours that rotate become halves."""
    if pairs:
        yield Run(0, pairs // 2, 0, 2)
        yield Run(1, pairs // 2, pairs // 2, 2)
    if head_size > pairs:
        yield Run(pairs, head_size - pairs, pairs)


def separate(ranks: Sequence[StoredArray], rows: FusedRows, role: Role) -> tuple[Piece, ...]:
    """Return pieces that make one role's projection: all heads, rank after rank."""
    pieces, to = [], 0
    for stored in ranks:
        runs: list[Run] = []
        for head in range(rows.count(role)):
            runs += rows.run(role, head, to)
            to += rows.head_size
        pieces.append(Piece(stored, _joined(runs)))
    return tuple(pieces)


def joined(ranks: Sequence[StoredArray], rows: FusedRows) -> tuple[Piece, ...]:
    """Return pieces that make [all queries, all keys, all values], as GPT-2 has them."""
    width = len(ranks) * rows.heads * rows.head_size
    pieces = []
    for part, role in enumerate(ROLES):
        for piece in separate(ranks, rows, role):
            runs = [Run(r.start, r.count, r.to + part * width, r.step) for r in piece.runs]
            pieces.append(Piece(piece.stored, tuple(runs)))
    return tuple(pieces)


def interleaved(ranks: Sequence[StoredArray], rows: FusedRows) -> tuple[Piece, ...]:
    """Return pieces that make query, key and value of each head in turn, as GPT-NeoX has them."""
    pieces, to = [], 0
    for stored in ranks:
        runs: list[Run] = []
        for head in range(rows.heads):
            for role in ROLES:
                runs += rows.run(role, head, to)
                to += rows.head_size
        pieces.append(Piece(stored, _joined(runs)))
    return tuple(pieces)


def _joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return the runs, with those that follow each other as one."""
    made: list[Run] = []
    for run in runs:
        last = made[-1] if made else None
        if (
            last is not None
            and last.step == run.step == 1
            and last.start + last.count == run.start
            and last.to + last.count == run.to
        ):
            made[-1] = Run(last.start, last.count + run.count, last.to)
        else:
            made.append(run)
    return tuple(made)
