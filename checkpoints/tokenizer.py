"""Text to token ids and back, and the raw bytes behind every id."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from nightjar.checkpoints.errors import CheckpointError
from nightjar.checkpoints.json_file import read_json_object

PROMPT_TOKEN = "<|PROMPT|>"  # noqa: S105 - a token of text, not of access
"""Stands in a prompt where a prompt vector is read; it can never be generated."""


class Tokenizer:
    """A byte-level BPE tokenizer from tokenizer.json.

    token_bytes[i] is what token i adds to the output; special tokens add nothing.
    special_ids are the special tokens' ids.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, token_bytes: list[bytes], special_ids: frozenset[int]
    ) -> None:
        self._backend = backend
        self.token_bytes = token_bytes
        self.special_ids = special_ids

    @staticmethod
    def read(path: Path, vocab_size: int) -> Tokenizer:
        """Read tokenizer.json; vocab_size is the number of embedding rows."""
        description = read_json_object(path)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer: {error}; restore the file") from error
        if not _is_byte_level(description):
            raise CheckpointError(
                f"{path}: only byte-level BPE tokenizers (GPT-2's kind) are supported"
            )
        backend.no_padding()
        backend.no_truncation()
        added = backend.get_added_tokens_decoder()
        special = frozenset(i for i, token in added.items() if token.special)
        plain = {i: token.content.encode() for i, token in added.items() if not token.special}
        table = [b""] * vocab_size
        for text, index in backend.get_vocab(with_added_tokens=True).items():
            if index >= vocab_size:
                if text != PROMPT_TOKEN:
                    raise CheckpointError(
                        f"{path}: token {text!r} has id {index}, but the model has {vocab_size} "
                        "embedding rows; use the tokenizer that was saved with the model"
                    )
            elif index not in special:
                table[index] = plain[index] if index in plain else _raw_bytes(path, text)
        return Tokenizer(backend, table, special)

    def encode(self, text: str) -> list[int]:
        """Token ids of the text; no special tokens are added around it."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts."""
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [list(encoding.ids) for encoding in found]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes[i] for i in ids).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """The id of a token given as it stands in the vocabulary, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def token(self, token_id: int) -> str | None:
        """The token of an id as it stands in the vocabulary, or None."""
        found: str | None = self._backend.id_to_token(token_id)
        return found


def _is_byte_level(description: dict[str, Any]) -> bool:
    """Whether the decoder turns one character of a token into one byte."""
    decoder = description.get("decoder") or {}
    steps = decoder.get("decoders") or [decoder]
    return [step.get("type") for step in steps] == ["ByteLevel"]


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _raw_bytes(path: Path, token: str) -> bytes:
    """The bytes a vocabulary entry stands for."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError as error:
        raise CheckpointError(
            f"{path}: token {token!r} is not made of byte-level characters; restore the file"
        ) from error
