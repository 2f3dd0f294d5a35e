"""Texts of which a pack of rows takes about what real Korean texts take.

Words of one to five syllables are drawn by Zipf's law out of a vocabulary that is drawn as well,
and some words are drawn anew. By zstd's level 3, 250 texts of 400 characters take 0.40 of their
bytes; film reviews of that length (NSMC) take 0.41, and texts that repeat each other a twentieth.
"""

import random
from collections.abc import Iterator
from itertools import accumulate

_SYLLABLES = 1_200
_WORDS = 12_000
_RARE = 0.25
"""The share of words that are drawn anew, as names, endings and misspellings are."""
_COMMON = bytes(
    byte for first in range(0xB0, 0xC9) for second in range(0xA1, 0xFF) for byte in (first, second)
).decode("euc-kr")
"""The 2,350 syllables that the standard KS X 1001 has, as those in use."""


def drawn_texts(count: int, characters: int, seed: int = 0) -> Iterator[str]:
    """`count` texts of so many characters; the same for the same seed."""
    rng = random.Random(seed)
    alphabet = rng.sample(_COMMON, _SYLLABLES)
    usual = list(accumulate(1 / (place + 4) for place in range(_SYLLABLES)))

    def word() -> str:
        length = rng.choices((1, 2, 3, 4, 5), (10, 30, 30, 20, 10))[0]
        return "".join(rng.choices(alphabet, cum_weights=usual, k=length))

    words = [word() for _ in range(_WORDS)]
    often = list(accumulate(1 / (place + 4) for place in range(_WORDS)))
    for _ in range(count):
        drawn = rng.choices(words, cum_weights=often, k=characters // 2)
        text = " ".join(word() if rng.random() < _RARE else one for one in drawn)
        yield text[:characters]
