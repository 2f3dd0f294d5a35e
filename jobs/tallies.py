"""Tallies: what the results of one micro-batch were, in numbers; reports of jobs add them up.

A tally is kept with its micro-batch. So a report of a million rows reads thousands of tallies, and
no result.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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


def tally_of(results: Sequence[NewResult], cost: ComputeCost | None = None) -> Tally:
    """Count results that land together."""
    good = [item for item in results if item.error is None]
    computed = [item for item in good if item.reused is None]
    generated = [item for item in computed if item.requested_tokens]
    tally = Tally(
        rows=len(results),
        failed=len(results) - len(good),
        reused=len(good) - len(computed),
        prompt_tokens=sum([item.prompt_tokens for item in computed]),
        completion_tokens=sum([item.completion_tokens for item in generated]),
        requested_tokens=sum([item.requested_tokens for item in generated]),
        saved_tokens=sum([item.saved_tokens for item in generated]),
        prompts=_bins([item.prompt_tokens for item in computed]),
        requested=_bins([item.requested_tokens for item in generated]),
        generated=_bins([item.completion_tokens for item in generated]),
        finish_reasons=_words([item.finish_reason for item in computed]),
        recomputed_in=_words([(item.body or {}).get("recomputed_in") for item in computed]),
    )
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


def _bins(lengths: Iterable[int]) -> dict[int, int]:
    """How many lengths lie in each bin."""
    counts: dict[int, int] = {}
    for length, count in Counter(lengths).items():  # lengths of one micro-batch are much alike
        number = bin_of(length)
        counts[number] = counts.get(number, 0) + count
    return counts


def _words(words: Iterable[object]) -> dict[str, int]:
    """How often each word comes; what is no word does not count."""
    return {word: count for word, count in Counter(words).items() if isinstance(word, str)}


def _add_counts(counts: dict[Key, int], more: Mapping[Key, int]) -> None:
    for key, count in more.items():
        counts[key] = counts.get(key, 0) + count
