"""How many bytes of a text one token stands for at most, by what tokenizer.json says.

A text of more bytes than a model's context holds in its longest tokens is too long, whatever its
tokens are. That is known before it is tokenized, which takes a hundred times its memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

# Bytes that composing may take off a text: three decomposed Hangul letters of three bytes each
# become one of three; a mathematical letter of four bytes becomes one of one (NFKC).
_SHRINKS = {"NFC": 3, "NFD": 3, "NFKC": 4, "NFKD": 4, "Prepend": 1}
_BLANK = "\u2581"
# Those that UTF-8 uses.
_BYTES_OF_TEXT = {bytes([byte]) for byte in (*range(0xC0), *range(0xC2, 0xF5))}


def most_bytes_of_a_token(description: dict[str, Any], token_bytes: Sequence[bytes]) -> int | None:
    """The bound; None where a step of the tokenizer may leave out any length of text.

    Args:
        description: What tokenizer.json holds.
        token_bytes: What each token adds to a text, b"" for special ones.
    """
    shrink = _shrink(description.get("normalizer"))
    added = description.get("added_tokens") or []
    takes_blanks = any(token.get("lstrip") or token.get("rstrip") for token in added)
    removes = '"Removed"' in json.dumps(description.get("pre_tokenizer"))
    # A byte that is no token may be left out, or several of them may become one unknown token.
    complete = {entry for entry in token_bytes if len(entry) == 1} >= _BYTES_OF_TEXT
    if shrink is None or takes_blanks or removes or not complete:
        return None
    written_out = (len(token["content"].encode()) for token in added)
    return shrink * max(*map(len, token_bytes), *written_out, 1)


def _shrink(normalizer: dict[str, Any] | None) -> int | None:
    """How many bytes of a text may become one; None if that is not bounded."""
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
