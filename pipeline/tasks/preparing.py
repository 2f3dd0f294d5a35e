"""What a task declares for its columns before templates see them: defaults, cleaning, cropping."""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from nightjar.pipeline.tasks.fields import Clean, Crop

Values = list[Any]

_CLEANERS: Mapping[Clean, Callable[[str], str]] = {
    "strip": str.strip,
    "collapse": lambda text: " ".join(text.split()),
    "nfc": lambda text: unicodedata.normalize("NFC", text),
    "nfkc": lambda text: unicodedata.normalize("NFKC", text),
}


class Tokens(Protocol):
    """What cropping needs of a model's tokenizer."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""


def fill(values: Values, default: object) -> Values:
    """Put a value in the place of each null."""
    return [default if value is None else value for value in values]


def clean(values: Values, steps: Sequence[Clean]) -> Values:
    """Clean each text, and each text of a list; other values stay."""

    def cleaned(text: str) -> str:
        for step in steps:
            text = _CLEANERS[step](text)
        return text

    return [_on_texts(value, cleaned) for value in values]


def crop(values: Values, rule: Crop, tokens: Tokens | None) -> Values:
    """Shorten each text, and each text of a list, to a fixed number of characters or tokens."""
    if rule.characters is not None:
        most = rule.characters
        return [_on_texts(value, lambda text: _cut(text, most, rule.keep)) for value in values]
    if not isinstance(rule.tokens, int) or tokens is None:
        return values
    # Each token has at least one byte: shorter texts need no tokenizer.
    longest = rule.tokens
    long = {text for value in values for text in _texts(value) if len(text.encode()) > longest}
    cropped = dict(zip(long, crop_to_tokens(list(long), longest, rule.keep, tokens), strict=True))
    return [_on_texts(value, lambda text: cropped.get(text, text)) for value in values]


def crop_to_tokens(texts: Sequence[str], most: int, keep: str, tokens: Tokens) -> list[str]:
    """Return the beginning or the end of each text that has at most so many tokens.

    The result is a part of the text itself, cut between characters.
    """
    found = list(texts)
    lengths: dict[int, int] = {}  # of the parts of texts that are too long, in characters
    for index, ids in enumerate(tokens.encode_batch(found)):
        if len(ids) > most:
            kept = ids[:most] if keep == "start" else ids[len(ids) - most :]
            lengths[index] = min(len(texts[index]), len(tokens.decode(kept))) if most > 0 else 0
    while lengths:
        parts = {index: _cut(texts[index], length, keep) for index, length in lengths.items()}
        # A part is tokenized anew, and another cut may need more tokens than before.
        counts = map(len, tokens.encode_batch(list(parts.values())))
        for (index, part), count in zip(parts.items(), list(counts), strict=True):
            if count <= most or not part:
                found[index] = part
                del lengths[index]
            else:
                lengths[index] = max(0, lengths[index] - (count - most))
    return found


def _cut(text: str, length: int, keep: str) -> str:
    if len(text) <= length:
        return text
    return text[:length] if keep == "start" else text[len(text) - length :]


def _texts(value: object) -> list[str]:
    """Return the texts of a value: itself, or those of a list, also within structs."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    if isinstance(value, dict):
        return [text for item in value.values() for text in _texts(item)]
    return []


def _on_texts(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - any column
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_on_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {name: _on_texts(item, change) for name, item in value.items()}
    return value
