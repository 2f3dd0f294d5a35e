"""Reads a file that people write by hand: TOML, or YAML by any other ending."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 20


class WrittenFileError(Exception):
    """The file cannot be read; the message says why, where, and how to mend it."""


@dataclass(frozen=True, slots=True)
class Written:
    """The text of a file, and the values that it stands for."""

    text: str
    values: Any


def read_written(path: Path, kind: str) -> Written:
    """Read a file of at most 1 MiB. kind: What it is called in messages, as "task file".

    Raises:
        WrittenFileError: It cannot be opened, is too long, or is no UTF-8, TOML or YAML.
    """
    text = _text(path, kind)
    values = _toml(path, text) if path.suffix.lower() == ".toml" else _yaml(path, text, kind)
    return Written(text, values)


def _text(path: Path, kind: str) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise WrittenFileError(f"the {kind} {path}: {error.strerror}") from error
    if len(raw) > _MOST_BYTES:
        raise WrittenFileError(f"{path} is longer than {_MOST_BYTES} bytes; no {kind} is")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = error.start + 1
        raise WrittenFileError(f"{path} is not UTF-8 (byte {place}); save it as UTF-8") from None


def _toml(path: Path, text: str) -> Any:  # noqa: ANN401 - whatever the file holds
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise WrittenFileError(f"{path} is not TOML: {error}; correct it") from error


def _yaml(path: Path, text: str, kind: str) -> Any:  # noqa: ANN401 - whatever the file holds
    try:
        import yaml  # noqa: PLC0415 - in an extra; only this kind of file needs it
    except ImportError as error:
        missing = f"a {kind} of YAML needs: pip install 'nightjar-batch[tables]'; or write TOML"
        raise WrittenFileError(missing) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise WrittenFileError(f"{path}{place} is not YAML: {problem}; correct it") from error
