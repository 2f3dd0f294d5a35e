"""The tokenizer of a converted model: it says how many rows of the embedding table are tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from nightjar.checkpoints.errors import CheckpointError
from nightjar.checkpoints.json_file import read_json_object

# Files that are copied beside tokenizer.json where a folder has them.
COPIED = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>", "[EOS]", "<eos>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer's files by name, its number of tokens, and the ids that end a text."""

    files: dict[str, bytes]
    size: int
    end_ids: tuple[int, ...]


def read_vocabulary(path: Path, end: str | None = None) -> Vocabulary:
    """Read a tokenizer.

    path: a folder with tokenizer.json, the file itself, or a folder with vocab.json and merges.txt
        of a byte-level BPE, as Megatron-LM's GPT2BPETokenizer has them.
    end: the token that ends a text; without it tokenizer_config.json or a usual name tells.

    Raises:
        CheckpointError: There is no tokenizer, or no such token.
    """
    folder = path if path.is_dir() else path.parent
    file = path if path.is_file() else folder / "tokenizer.json"
    if file.is_file():
        data = file.read_bytes()
        backend = _load(file, data)
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = _byte_level(folder)
        data = backend.to_str().encode()
    else:
        raise CheckpointError(
            f"{path}: neither tokenizer.json nor vocab.json with merges.txt; save the tokenizer "
            "there (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    files = {"tokenizer.json": data}
    files |= {name: (folder / name).read_bytes() for name in COPIED if (folder / name).is_file()}
    size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    return Vocabulary(files, size, _end_ids(backend, folder, end))


def _load(path: Path, data: bytes) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: not a tokenizer: {error}; restore the file") from error


def _byte_level(folder: Path) -> tokenizers.Tokenizer:
    """Return GPT-2's kind of tokenizer from its two files."""
    try:
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{folder}: vocab.json and merges.txt are no byte-level BPE: {error}"
        ) from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [token for token in _ENDS if backend.token_to_id(token) is not None]
    backend.add_special_tokens(special)
    return backend


def _end_ids(backend: tokenizers.Tokenizer, folder: Path, end: str | None) -> tuple[int, ...]:
    if end is not None:
        index = backend.token_to_id(end)
        if index is None:
            raise CheckpointError(f"{folder}: the tokenizer has no token {end!r}")
        return (index,)
    names = [*_configured_end(folder), *_ENDS]
    found = [index for name in names if (index := backend.token_to_id(name)) is not None]
    return tuple(found[:1])


def _configured_end(folder: Path) -> list[str]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return []
    token = read_json_object(path).get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    return [token] if isinstance(token, str) else []


def as_json(value: object) -> bytes:
    """Return a JSON file's bytes."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
