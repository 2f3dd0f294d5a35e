"""Remembers token ids of words, so that a text of known words need not be tokenized again.

Byte-level BPE first cuts a text by a regular expression. In the expressions below, a blank is the
first character of a match, or it stands among other white space. There is no look-behind. So a
match ends at every single blank between two characters that are not white space. The ids of a text
are then the ids of its first word and of each later word with its blank, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Encode = Callable[[str], list[int]]
EncodeBatch = Callable[[Sequence[str]], list[list[int]]]

MOST_WORDS = 1 << 15
MOST_CHARACTERS = 32  # most characters of a kept word

# Of Llama 3 and Qwen 2; GPT-2's is ByteLevel's own.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_EXPRESSIONS = frozenset(
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + _REST
    for digits in (r"\p{N}", r"\p{N}{1,3}")
)


def cuts_at_blanks(description: dict[str, Any]) -> bool:
    """Whether a text's ids are those of its words, by tokenizer.json."""
    normalizer = description.get("normalizer")
    tokens = description.get("added_tokens") or []
    return (
        (normalizer is None or normalizer.get("type") == "NFC")  # which does not change blanks
        and description["model"].get("type") == "BPE"
        and not description["model"].get("dropout")
        and _pre_tokenizer_cuts(description.get("pre_tokenizer") or {})
        and not any(_may_reach_across(token) for token in tokens)
    )


def _pre_tokenizer_cuts(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return True
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": expression},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return expression in _EXPRESSIONS
    return False


def _may_reach_across(token: dict[str, Any]) -> bool:
    """Whether an added token may match, or depend on, characters beside its own."""
    wide = token.get("lstrip") or token.get("rstrip") or token.get("single_word")
    return bool(wide) or any(character.isspace() for character in token["content"])


class WordCache:
    """Encodes texts by their words.

    Words that begin a text and words after a blank are kept in two halves. A full half is emptied.
    So unique words, such as a number at the start of each text, do not push out the other half.

    Args:
        encode: Tokenizes one word; for so little, threads cost more than they save.
        encode_batch: Tokenizes whole texts; `cuts_at_blanks` of its description holds.
        most_words: How many words are kept.
    """

    def __init__(
        self, encode: Encode, encode_batch: EncodeBatch, most_words: int = MOST_WORDS
    ) -> None:
        self._encode = encode
        self._encode_batch = encode_batch
        self._most_of_each = most_words // 2
        self._first: dict[str, list[int]] = {}
        self._later: dict[str, list[int]] = {}  # words without the blank before them

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, equal to the tokenizer's own."""
        # After the texts are encoded: most texts that repeat no word are tokenized whole.
        if len(self._first) >= self._most_of_each:
            self._first = {}
        if len(self._later) >= self._most_of_each:
            self._later = {}
        found = [self._by_words(text) for text in texts]
        whole = iter(
            self._encode_batch([t for t, ids in zip(texts, found, strict=True) if ids is None])
        )
        return [next(whole) if ids is None else ids for ids in found]

    def _by_words(self, text: str) -> list[int] | None:
        """Return the text's ids, if all its words are known or can be added."""
        first, *later = text.split(" ")
        try:
            return self._join(first, later)
        except KeyError:
            self._learn(first, later)
        try:
            return self._join(first, later)
        except KeyError:
            return None

    def _join(self, first: str, later: Sequence[str]) -> list[int]:
        ids = self._first[first].copy()
        for known in map(self._later.__getitem__, later):
            ids += known
        return ids

    def _learn(self, first: str, later: Sequence[str]) -> None:
        """Add the words of a text, all or none, if there is room."""
        known_first, known_later = self._first, self._later
        # Not as a difference of sets, which would read all known words.
        new = {word for word in later if word not in known_later}
        if (
            len(known_first) < self._most_of_each
            and len(known_later) + len(new) <= self._most_of_each
            and all(map(_can_be_kept, (first, *new)))
        ):
            if first not in known_first:
                known_first[first] = self._encode(first)
            for word in new:
                known_later[word] = self._encode(f" {word}")


def _can_be_kept(word: str) -> bool:
    """Whether the word is short, and begins and ends with no kind of white space."""
    return 0 < len(word) <= MOST_CHARACTERS and _is_visible(word[0]) and _is_visible(word[-1])


def _is_visible(character: str) -> bool:
    return character.isprintable() and not character.isspace()
