"""Tallies: what the results of one micro-batch were, in numbers; reports of jobs add them up.

A tally is kept with its micro-batch. So a report of a million rows reads thousands of tallies, and
no result.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from nightjar.jobs.records import NewResult

Key = TypeVar("Key", int, str)

# The lower edges of the bins of lengths in tokens: two bins for each power of two, so that each
# bucket of the planner begins with a bin.
BIN_EDGES = (0, 1, *sorted({round(2 ** (n / 2)) for n in range(2, 49)}))


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """What it took to compute a micro-batch; filled by the worker.

    Attributes:
        engine_s: Its share of the seconds that the engine spent in steps.
        steps: Its share of the engine's steps.
        cached_tokens: Tokens of prompts and queries that the prefix cache held.
        pruned_tokens: Tokens of documents that were not scored, as top_n did not need them.
        pruned_documents: Documents that could not be among the best, and so were not scored whole.
        precision: The precision of the model.
        version: The version of Nightjar.
    """

    engine_s: float = 0.0
    steps: float = 0.0
    cached_tokens: int = 0
    pruned_tokens: int = 0
    pruned_documents: int = 0
    precision: str = ""
    version: str = ""


class Tally(msgspec.Struct, omit_defaults=True):
    """Sums and counts over results. The keys of lengths are indexes into BIN_EDGES."""

    rows: int = 0
    failed: int = 0
    reused: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    requested_tokens: int = 0
    saved_tokens: int = 0
    cached_tokens: int = 0
    pruned_tokens: int = 0
    pruned_documents: int = 0
    engine_s: float = 0.0
    steps: float = 0.0
    prompts: dict[int, int] = msgspec.field(default_factory=dict)
    requested: dict[int, int] = msgspec.field(default_factory=dict)
    generated: dict[int, int] = msgspec.field(default_factory=dict)
    finish_reasons: dict[str, int] = msgspec.field(default_factory=dict)
    recomputed_in: dict[str, int] = msgspec.field(default_factory=dict)
    precisions: dict[str, int] = msgspec.field(default_factory=dict)
    versions: dict[str, int] = msgspec.field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        """Add the numbers of another tally."""
        for name in _FIELDS:
            value = getattr(other, name)
            if isinstance(value, dict):
                _add_counts(getattr(self, name), value)
            elif value:
                setattr(self, name, getattr(self, name) + value)


_FIELDS = Tally.__struct_fields__
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Tally)


def bin_of(tokens: int) -> int:
    """The bin of a length."""
    return bisect_right(BIN_EDGES, tokens) - 1


def tally_of(results: Iterable[NewResult], cost: ComputeCost | None = None) -> Tally:
    """Count results that land together."""
    tally = Tally()
    for item in results:
        _count(tally, item)
    if cost is not None:
        tally.engine_s, tally.steps = round(cost.engine_s, 6), round(cost.steps, 3)
        tally.cached_tokens, tally.pruned_tokens = cost.cached_tokens, cost.pruned_tokens
        tally.pruned_documents = cost.pruned_documents
        if cost.precision:
            tally.precisions = {cost.precision: tally.rows}
        if cost.version:
            tally.versions = {cost.version: tally.rows}
    return tally


def dump_tally(tally: Tally) -> str:
    """A tally as it is stored."""
    return _encoder.encode(tally).decode()


def load_tally(stored: str | None) -> Tally:
    """A stored tally; an empty one where nothing is stored, or where it cannot be read."""
    if stored is None:
        return Tally()
    try:
        return _decoder.decode(stored)
    except msgspec.DecodeError:
        return Tally()


def _count(tally: Tally, item: NewResult) -> None:
    tally.rows += 1
    if item.error is not None:
        tally.failed += 1
        return
    if item.reused is not None:
        tally.reused += 1
        return
    tally.prompt_tokens += item.prompt_tokens
    _add_one(tally.prompts, bin_of(item.prompt_tokens))
    if item.requested_tokens:
        tally.completion_tokens += item.completion_tokens
        tally.requested_tokens += item.requested_tokens
        tally.saved_tokens += item.saved_tokens
        _add_one(tally.requested, bin_of(item.requested_tokens))
        _add_one(tally.generated, bin_of(item.completion_tokens))
    if item.finish_reason is not None:
        _add_one(tally.finish_reasons, item.finish_reason)
    higher = None if item.body is None else item.body.get("recomputed_in")
    if isinstance(higher, str):
        _add_one(tally.recomputed_in, higher)


def _add_one(counts: dict[Key, int], key: Key) -> None:
    counts[key] = counts.get(key, 0) + 1


def _add_counts(counts: dict[Key, int], more: Mapping[Key, int]) -> None:
    for key, count in more.items():
        counts[key] = counts.get(key, 0) + count
