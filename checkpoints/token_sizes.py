"""The most bytes of a text that one token stands for, from tokenizer.json.

A text with more bytes than the longest tokens could hold in the context is too long in any case.
So it is refused without tokenizing it, which takes a hundred times its memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

# Composing makes a text shorter: three decomposed Hangul letters of three bytes each become one of
# three; a mathematical letter of four bytes becomes one of one (NFKC).
_SHRINKS = {"NFC": 3, "NFD": 3, "NFKC": 4, "NFKD": 4, "Prepend": 1}
_BLANK = "\u2581"
# Those that UTF-8 uses.
_BYTES_OF_TEXT = {bytes([byte]) for byte in (*range(0xC0), *range(0xC2, 0xF5))}


def most_bytes_of_a_token(description: dict[str, Any], token_bytes: Sequence[bytes]) -> int | None:
    """Return the bound; None where a step of the tokenizer may leave out any length of text.

    Args:
        description: The content of tokenizer.json.
        token_bytes: The bytes that each token adds to a text, b"" for special ones.
    """
    shrink = _shrink(description.get("normalizer"))
    added = description.get("added_tokens") or []
    takes_blanks = any(token.get("lstrip") or token.get("rstrip") for token in added)
    removes = '"Removed"' in json.dumps(description.get("pre_tokenizer"))
    # A byte without a token may be left out, or several may become one unknown token.
    complete = {entry for entry in token_bytes if len(entry) == 1} >= _BYTES_OF_TEXT
    if shrink is None or takes_blanks or removes or not complete:
        return None
    written_out = (len(token["content"].encode()) for token in added)
    return shrink * max(*map(len, token_bytes), *written_out, 1)


def _shrink(normalizer: dict[str, Any] | None) -> int | None:
    """Return how many bytes of a text may become one; None if unbounded."""
    if normalizer is None:
        return 1
    kind = normalizer.get("type")
    if kind == "Sequence":
        product = 1
        for step in normalizer.get("normalizers") or []:
            factor = _shrink(step)
            if factor is None:
                return None
            product *= factor
        return product
    if kind == "Replace":
        pattern, content = normalizer.get("pattern"), normalizer.get("content")
        return 1 if (pattern, content) == ({"String": " "}, _BLANK) else None
    return _SHRINKS.get(str(kind))
