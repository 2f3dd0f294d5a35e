"""Cuts a long text into pieces whose token ids, one after the other, are those of the text.

Tokenizing takes some hundred times the memory of its text. By pieces the memory is bounded, and a
text that is too long for its model is known to be so before all of it is tokenized.

Byte-level BPE first cuts a text by one of the regular expressions of `word_cache.py`. In all of
them a match that reaches a letter or a digit ends before a character of another kind, and none
depends on what stands before it. So a text may be cut there. Marks are no such character: they may
be composed with the letter before them.
"""

import re
from collections.abc import Collection, Iterator
from itertools import islice

PIECE_CHARACTERS = 1 << 17
"""A text of more characters than these is long."""
GROUP_CHARACTERS = 1 << 19
"""So many are tokenized at once."""

# Some letters and digits that every version of Unicode agrees on, then what may follow a cut.
_LETTERS = (
    r"A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0391-\u03a1\u03a3-\u03a9\u03b1-\u03c9"
    r"\u0400-\u0481\u05d0-\u05ea\u0621-\u063a\u0641-\u064a\u0905-\u0939\u0e01-\u0e30"
    r"\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_OTHERS = r" \t\n\r!-/:-@\[-`{-~\u3001\u3002\uff01\uff0c\uff1f"
_CUT = re.compile(
    rf"(?<=[{_LETTERS}0-9])(?=[{_OTHERS}])|(?<=[0-9])(?=[{_LETTERS}])|(?<=[{_LETTERS}])(?=[0-9])"
)
_TRIES = 64  # cuts that are looked at in one place


class LongTexts:
    """Cuts texts for one tokenizer, never within a token that is written out.

    Args:
        written_out: The texts of the tokenizer's added tokens, which are found before all others.
    """

    def __init__(self, written_out: Collection[str]) -> None:
        tokens = sorted(filter(None, written_out), key=len, reverse=True)
        self._token = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._widest = max(map(len, tokens), default=0)

    def pieces(self, text: str) -> Iterator[str]:
        """Yield the text in pieces; one is longer than PIECE_CHARACTERS if it cannot be cut."""
        start = 0
        while len(text) - start > PIECE_CHARACTERS:
            end = self._find_cut(text, start + PIECE_CHARACTERS)
            yield text[start:end]
            start = end
        if start < len(text):
            yield text[start:]

    def _find_cut(self, text: str, at: int) -> int:
        """Return the first place from `at` on where the text may be cut, or its end."""
        while (first := _CUT.search(text, at)) is not None:
            for match in islice(_CUT.finditer(text, first.end()), _TRIES):
                if not self._is_near_a_token(text, match.end()):
                    return match.end()
            at = first.end() + PIECE_CHARACTERS
        return len(text)

    def _is_near_a_token(self, text: str, at: int) -> bool:
        if self._token is None:
            return False
        return self._token.search(text, max(0, at - self._widest), at + self._widest) is not None
