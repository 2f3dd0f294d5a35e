"""The work every system is given: seeded prompts, documents, and stop strings that really occur.

Prompts are words of the model's vocabulary, one token each, by their ids.  A stop string is cut out
of the text that the reference (transformers fp32) makes of the very prompt, so that it occurs where
it is meant to; the models (weights.py) say the same in any precision.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from .peers.protocol import Generated, Generation, Ranking, Workload

SHORTEST, LONGEST = 8, 400
STOP_BYTES = 7
"""Length of a stop string: it mostly begins and ends inside tokens."""

DECODE_ROWS = 32

Reference = Callable[[list[Generation]], list[Generated]]
"""Greedy texts without stops, of the reference system."""


@dataclass(frozen=True)
class Sizes:
    """How much work; `scaled` shrinks counts and leaves lengths as they are."""

    generations: int = 96
    rank_queries: int = 12
    rank_long_queries: int = 2
    catalogue_queries: int = 50
    catalogue_documents: int = 200
    conversations: int = 8
    turns: int = 6
    long_prompts: int = 8
    even_requests: int = 64
    short_answers: int = 32
    first_tokens: int = 4

    def scaled(self, scale: float) -> "Sizes":
        """Every count times scale, two at least (turns and the catalogue's documents stay)."""
        if not 0 < scale <= 1:
            raise ValueError(f"scale {scale}: a number above 0, at most 1")
        counts = {name: max(2, round(count * scale)) for name, count in asdict(self).items()}
        kept = {"turns": self.turns, "catalogue_documents": self.catalogue_documents}
        return Sizes(**counts | kept)


def log_normal_lengths(rng: random.Random, count: int) -> list[int]:
    """Lengths around a median of 64, none shorter than SHORTEST or longer than LONGEST."""
    lengths = (round(rng.lognormvariate(math.log(64), 0.8)) for _ in range(count))
    return [min(max(length, SHORTEST), LONGEST) for length in lengths]


def stop_in(text: str, ends: Sequence[int], tokens: int) -> str | None:
    """A string of `text` that first occurs across the end of the token number `tokens`.

    ends: where each token ends in the text.  The string is complete with the next token, so a
    system that stops at once has computed tokens + 1.  None where no string that long is new.
    """
    if len(ends) <= tokens:
        return None
    for end in range(ends[tokens - 1] + 1, ends[tokens]):
        stop = text[max(0, end - STOP_BYTES) : end]
        if len(stop) == STOP_BYTES and text.find(stop) == end - STOP_BYTES:
            return stop
    return None


def token_ends(text: str) -> list[int]:
    """Where the tokens of a generated text end: each is a space and a word."""
    starts = [place for place, character in enumerate(text) if character == " "]
    return [*starts[1:], len(text)] if starts else []


def with_stops(
    generations: Sequence[Generation], texts: Sequence[Generated], after: Sequence[int]
) -> list[Generation]:
    """Each request with a stop of its own text that is complete one token after `after`.

    Where the text repeats itself there, a later place is taken, or one not much earlier; where
    there is none, the request has no stop.
    """
    found = []
    for generation, made, wanted in zip(generations, texts, after, strict=True):
        ends = token_ends(made.text)
        tries = [wanted, *range(wanted + 1, len(ends)), *range(wanted - 1, wanted // 2, -1)]
        stops = (stop_in(made.text, ends, tokens) for tokens in tries)
        found.append(replace(generation, stop=next((stop for stop in stops if stop), None)))
    return found


def generate(words: range, rng: random.Random, sizes: Sizes, reference: Reference) -> Workload:
    """Mixed lengths around 64, 64 tokens asked, a stop of its own after 12 to 17 tokens."""
    lengths = log_normal_lengths(rng, sizes.generations)
    requests = [Generation(rng.choices(words, k=length), 64) for length in lengths]
    after = [rng.randint(11, 16) for _ in requests]
    asked = [replace(request, max_tokens=32) for request in requests]
    return Workload("generate", with_stops(requests, reference(asked), after))


def short_answers(words: range, rng: random.Random, sizes: Sizes, reference: Reference) -> Workload:
    """240 tokens asked, the answer ends after 24; short prompts, whose prefill is in both times."""
    lengths = [rng.randint(8, 32) for _ in range(sizes.short_answers)]
    requests = [Generation(rng.choices(words, k=length), 240) for length in lengths]
    asked = [replace(request, max_tokens=48) for request in requests]
    stopped = with_stops(requests, reference(asked), [23] * len(requests))
    return Workload("short_answers", stopped)


def texts(name: str, ids: Sequence[Sequence[int]], max_tokens: int) -> Workload:
    """Prompts without stops."""
    return Workload(name, [Generation(list(row), max_tokens) for row in ids])


def long_prompts(words: range, rng: random.Random, sizes: Sizes) -> Workload:
    """Prompts of 900 tokens, 16 asked."""
    return texts("long_prompts", [rng.choices(words, k=900) for _ in range(sizes.long_prompts)], 16)


def mixed_and_even(words: range, rng: random.Random, sizes: Sizes) -> tuple[Workload, Workload]:
    """Prompts of 8 to 400 tokens, and as many of equal length with the same total of tokens."""
    count = sizes.even_requests
    lengths = [round(8 * (400 / 8) ** (i / (count - 1))) for i in range(count)]
    rng.shuffle(lengths)
    base, more = divmod(sum(lengths), count)
    even = [base + (i < more) for i in range(count)]
    drawn = [[rng.choices(words, k=length) for length in each] for each in (lengths, even)]
    return texts("mixed_lengths", drawn[0], 32), texts("even_lengths", drawn[1], 32)


def prefill_and_decode(words: range, rng: random.Random, sizes: Sizes) -> list[Workload]:
    """What the engine's prefill and decode speeds are read from.

    prefill_only: prompts of 128 tokens, one token asked.  decode_to less decode_from: 32 rows of
    64 tokens, from the second token to the 65th, so 64 steps at a mean context of 97.
    """
    prompts = [rng.choices(words, k=128) for _ in range(sizes.even_requests)]
    rows = [rng.choices(words, k=64) for _ in range(DECODE_ROWS)]
    named = (("prefill_only", prompts, 1), ("decode_from", rows, 1), ("decode_to", rows, 65))
    return [texts(name, ids, asked) for name, ids, asked in named]


def multi_turn(words: range, rng: random.Random, sizes: Sizes) -> Workload:
    """Conversations: each turn's prompt is four fifths the one before it, 8 tokens asked.

    The answer inside a later prompt is fixed text, the same for every system, not its own.
    """
    requests = []
    for _ in range(sizes.conversations):
        prompt = rng.choices(words, k=200)
        for turn in range(sizes.turns):
            requests.append(Generation(prompt, 8, wave=turn))
            prompt = prompt + rng.choices(words, k=round(len(prompt) / 4))
    return Workload("multi_turn", requests)


def first_token(words: range, rng: random.Random, sizes: Sizes) -> Workload:
    """Threes of prompts, one token asked: 400 tokens; the same and 100 more; 500 fresh ones.

    The second against the third is what a prefix cache saves in time to first token.
    """
    prompts: list[list[int]] = []
    for _ in range(sizes.first_tokens):
        prefix = rng.choices(words, k=400)
        prompts += (prefix, prefix + rng.choices(words, k=100), rng.choices(words, k=500))
    # Each alone: a wave is timed.
    return Workload("first_token", [Generation(ids, 1, wave=n) for n, ids in enumerate(prompts)])


def rank(words: range, rng: random.Random, sizes: Sizes) -> Workload:
    """Queries of 135 to 165 tokens, 16 documents of 8 to 14 each."""
    rankings = []
    for _ in range(sizes.rank_queries):
        documents = [rng.choices(words, k=rng.randint(8, 14)) for _ in range(16)]
        rankings.append(Ranking(rng.choices(words, k=rng.randint(135, 165)), documents))
    return Workload("rank", rankings=rankings)


def rank_long(words: range, rng: random.Random, sizes: Sizes) -> Workload:
    """Queries of 500 tokens, 100 documents of 30."""
    rankings = []
    for _ in range(sizes.rank_long_queries):
        documents = [rng.choices(words, k=rng.randint(25, 35)) for _ in range(100)]
        rankings.append(Ranking(rng.choices(words, k=500), documents))
    return Workload("rank_long", rankings=rankings)


def catalogue(words: range, rng: random.Random, sizes: Sizes) -> Workload:
    """One catalogue of 200 documents of 8 to 14 tokens, ranked for 50 queries of 32 to 64."""
    documents = [rng.choices(words, k=rng.randint(8, 14)) for _ in range(sizes.catalogue_documents)]
    queries = [rng.choices(words, k=rng.randint(32, 64)) for _ in range(sizes.catalogue_queries)]
    return Workload("catalogue", rankings=[Ranking(query, documents) for query in queries])


def build(words: range, sizes: Sizes, reference: Reference) -> dict[str, Workload]:
    """Every workload by its name; each has a generator of its own, so one size moves no other.

    words: the ids of the model's words.
    """

    def rng(name: str) -> random.Random:
        return random.Random(f"0-{name}")

    short = short_answers(words, rng("short_answers"), sizes, reference)
    mixed, even = mixed_and_even(words, rng("mixed"), sizes)
    alike = (rank, rank_long, catalogue, multi_turn, long_prompts, first_token)
    made = [
        generate(words, rng("generate"), sizes, reference),
        *(make(words, rng(make.__name__), sizes) for make in alike),
        mixed,
        even,
        short,
        Workload("full_answers", [replace(g, stop=None) for g in short.generations]),
        *prefill_and_decode(words, rng("prefill_and_decode"), sizes),
    ]
    return {workload.name: workload for workload in made}
