"""Text to token ids and back, and the raw bytes behind every id."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from nightjar.checkpoints.errors import CheckpointError
from nightjar.checkpoints.json_file import read_json_object
from nightjar.checkpoints.long_texts import GROUP_CHARACTERS, PIECE_CHARACTERS, LongTexts
from nightjar.checkpoints.token_sizes import most_bytes_of_a_token
from nightjar.checkpoints.word_cache import WordCache, cuts_at_blanks
from nightjar.groups import in_groups

PROMPT_TOKEN = "<|PROMPT|>"  # noqa: S105 - a token of text, not of access
"""Stands in a prompt where a prompt vector is read; it can never be generated."""


@dataclass(frozen=True, slots=True)
class Alphabet:
    """How the entries of a vocabulary stand for bytes.

    byte_level: one character a byte (GPT-2's alphabet).  Otherwise entries are text with U+2581 for
    a blank, and `<0x0A>` for single bytes (SentencePiece with byte fallback).
    drops_first_blank: encoding puts a blank before a text, and decoding removes it.
    """

    byte_level: bool
    drops_first_blank: bool

    def raw_bytes(self, token: str) -> bytes:
        """Return the bytes of a vocabulary entry."""
        if self.byte_level:
            if all(character in _BYTE_OF_CHARACTER for character in token):
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            return token.encode()  # as text, as the tokenizers library does
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace(BLANK, " ").encode()


class Tokenizer:
    """A BPE tokenizer from tokenizer.json: byte-level, or SentencePiece's with byte fallback.

    token_bytes[i]: the bytes that token i adds to a text.  Special tokens add none, and neither do
    ids past the tokenizer (embedding rows that pad the table).
    special_ids: the special tokens' ids.
    prefix_ids: the tokens that the model expects first, such as a begin-of-text token.
    padding_ids: ids of embedding rows that no entry of the vocabulary has.
    most_bytes: the most UTF-8 bytes of a text that one token can stand for; None if unknown.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        alphabet: Alphabet,
        token_bytes: list[bytes],
        special_ids: frozenset[int],
        *,
        by_words: bool = False,
        most_bytes: int | None = None,
        padding_ids: tuple[int, ...] = (),
    ) -> None:
        self._backend = backend
        self._alphabet = alphabet
        self.token_bytes = token_bytes
        self.special_ids = special_ids
        self.most_bytes = most_bytes
        self.padding_ids = padding_ids
        self.prefix_ids = _prefix_ids(backend)
        self._words = WordCache(self.encode, self._encode_whole) if by_words else None
        written_out = [token.content for token in backend.get_added_tokens_decoder().values()]
        self.long_texts = LongTexts(written_out) if by_words else None

    @staticmethod
    def read(path: Path, vocab_size: int) -> Tokenizer:
        """Read tokenizer.json; vocab_size is the number of embedding rows."""
        description = read_json_object(path)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer: {error}; restore the file") from error
        alphabet = _alphabet(path, description)
        backend.no_padding()
        backend.no_truncation()
        added = backend.get_added_tokens_decoder()
        special = frozenset(i for i, token in added.items() if token.special)
        plain = {i: token.content.encode() for i, token in added.items() if not token.special}
        table = [b""] * vocab_size
        vocabulary = backend.get_vocab(with_added_tokens=True)
        for text, index in vocabulary.items():
            if index >= vocab_size:
                if text != PROMPT_TOKEN:
                    raise CheckpointError(
                        f"{path}: token {text!r} has id {index}, but the model has {vocab_size} "
                        "embedding rows; use the tokenizer that was saved with the model"
                    )
            elif index not in special:
                table[index] = plain[index] if index in plain else alphabet.raw_bytes(text)
        return Tokenizer(
            backend,
            alphabet,
            table,
            special,
            by_words=cuts_at_blanks(description),
            most_bytes=most_bytes_of_a_token(description, table),
            padding_ids=tuple(sorted(set(range(vocab_size)) - set(vocabulary.values()))),
        )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; no special tokens are added."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str], most_tokens: int | None = None) -> list[list[int]]:
        """Return the token ids of several texts.

        A long text of more than `most_tokens` may give its first ids only; they are more than that.
        """
        if self.long_texts is None or max(map(len, texts), default=0) <= PIECE_CHARACTERS:
            return self._encode_short(texts)
        return [
            self._encode_long(self.long_texts.pieces(text), most_tokens)
            if len(text) > PIECE_CHARACTERS
            else self._encode_short([text])[0]
            for text in texts
        ]

    def _encode_long(self, pieces: Iterable[str], most_tokens: int | None) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            ids += self._encode_short([piece])[0]
            if most_tokens is not None and len(ids) > most_tokens:
                break
        return ids

    def _encode_short(self, texts: Sequence[str]) -> list[list[int]]:
        return self._words.encode_batch(texts) if self._words else self._encode_whole(texts)

    def _encode_whole(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = []
        for group in in_groups(texts, len, GROUP_CHARACTERS):
            found = self._backend.encode_batch_fast(group, add_special_tokens=False)
            ids += [encoding.ids for encoding in found]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids; bytes that are not UTF-8 become U+FFFD."""
        raw = b"".join(self.token_bytes[i] for i in ids)
        if self._alphabet.drops_first_blank:
            raw = raw.removeprefix(b" ")
        return raw.decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary entry of an id, or None."""
        found: str | None = self._backend.id_to_token(token_id)
        return found


def _alphabet(path: Path, description: dict[str, Any]) -> Alphabet:
    """Return how entries stand for bytes, from the steps of the tokenizer's decoder."""
    decoder = description.get("decoder") or {}
    steps = decoder.get("decoders") or [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return Alphabet(byte_level=True, drops_first_blank=False)
    strips = False
    for kind, step in zip(kinds, steps, strict=True):
        if kind == "Strip" and (step.get("content"), step.get("stop")) == (" ", 0):
            strips = step.get("start") == 1
        elif kind == "Metaspace" and step.get("replacement") == BLANK:
            strips = step.get("prepend_scheme") != "never"
        elif kind == "Replace":
            if (step.get("pattern"), step.get("content")) != ({"String": BLANK}, " "):
                raise _unsupported(path, kinds)
        elif kind not in ("ByteFallback", "Fuse"):
            raise _unsupported(path, kinds)
    if "ByteFallback" not in kinds or not {"Replace", "Metaspace"} & set(kinds):
        raise _unsupported(path, kinds)
    return Alphabet(byte_level=False, drops_first_blank=strips)


def _unsupported(path: Path, kinds: list[str | None]) -> CheckpointError:
    """Make the error for a tokenizer with another kind of entries."""
    return CheckpointError(
        f"{path}: only byte-level BPE tokenizers (GPT-2's kind) and SentencePiece's with byte "
        f"fallback (Llama 2's kind) are supported; this one decodes by {kinds}"
    )


def _prefix_ids(backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Return the special tokens that the tokenizer's template puts before a text."""
    encoding = backend.encode("a", add_special_tokens=True)
    specials = list(encoding.special_tokens_mask)
    return tuple(encoding.ids[: specials.index(0)]) if 0 in specials else ()


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


BLANK = "\u2581"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_BYTE_OF_CHARACTER = _byte_of_character()
