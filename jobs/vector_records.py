"""Records of prompt vectors and LoRA adapters: a version, an alias, how a request refers to one."""

import re
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["vectors", "lora"]
"""What is registered under a name: prompt vectors, or a LoRA adapter."""

VECTORS: Final = "vectors"
LORA: Final = "lora"

LATEST = "latest"
"""The alias that a name without `@` means; registering a version moves it there."""

_ALIAS = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class PromptVector:
    """Prompt vectors, or a LoRA adapter, under a name.

    data: a safetensors file, empty in listings.
    """

    name: str
    version: int  # from 1
    sha256: str
    length: int  # vectors, or the adapter's largest rank
    width: int  # the model's hidden size
    data: bytes
    fingerprint: str | None = None  # of the model they were trained for, where known
    kind: Kind = VECTORS

    @property
    def key(self) -> str:
        """The version as plans name it."""
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class VectorFile:
    """A safetensors file as it was registered; `data` is empty for a key that does not exist."""

    data: bytes
    kind: Kind = VECTORS


@dataclass(frozen=True, slots=True)
class VectorAlias:
    """A second name of one version; it may move to another."""

    name: str
    alias: str
    version: int


def split_reference(reference: str) -> tuple[str, str | int]:
    """Return the name, and the version or alias, that `NAME`, `NAME@3` or `NAME@ALIAS` means."""
    name, _, selector = reference.partition("@")
    if not selector:
        return name, LATEST
    # A longer number is no version: databases hold none so large.
    is_version = selector.isascii() and selector.isdigit() and len(selector) < 10
    return name, int(selector) if is_version else selector


def is_alias(text: str) -> bool:
    """Whether it may be the alias of a version: a letter, then letters, digits, `.`, `_`, `-`."""
    return _ALIAS.fullmatch(text) is not None
