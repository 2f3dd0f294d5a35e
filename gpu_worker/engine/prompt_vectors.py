"""The prompt vectors that requests may name, in host memory.

A step uploads the rows that it reads, and nothing stays on the device. So a GPU holds no table of
them, however many are registered. The worker decides which vectors stay here.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PromptVectors:
    """One set of vectors.

    rows: float32[n, H] on the host.
    salt: 120 bits of a hash of the rows, never 0. Prefixes with equal vectors share cache blocks.
    """

    rows: Tensor
    salt: int

    @staticmethod
    def of(vectors: Tensor) -> PromptVectors:
        """Copy vectors [n, H] of floats."""
        rows = vectors.detach().to("cpu", torch.float32, copy=True).contiguous()
        digest = blake2b(rows.numpy().tobytes(), digest_size=15).digest()
        return PromptVectors(rows, int.from_bytes(digest, "little") or 1)


class PromptVectorStore:
    """The sets of vectors by key; several engines over one model may share a store."""

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self._sets: dict[str, PromptVectors] = {}
        self._refused: dict[str, str] = {}

    def register(self, key: str, vectors: Tensor) -> None:
        """Store a copy of vectors [n, H] under a key, in place of earlier ones.

        Requests that run keep the vectors that they started with.
        A set that does not fit the model is noted as refused: each request that names it fails
        with the reason.
        """
        self.forget(key)
        reason = self._unfit(vectors)
        if reason is None:
            self._sets[key] = PromptVectors.of(vectors)
        else:
            self._refused[key] = f"prompt vectors {key!r}: {reason}"

    def forget(self, key: str) -> None:
        """Drop a key; requests that run keep its vectors until they end."""
        self._sets.pop(key, None)
        self._refused.pop(key, None)

    def find(self, key: str | None) -> PromptVectors | None:
        """Return the vectors under a key; None for no key.

        Raises KeyError, with the reason as its message, for a key that is unknown or refused.
        """
        if key is None:
            return None
        if key in self._refused:
            raise KeyError(self._refused[key])
        if key not in self._sets:
            raise KeyError(f"prompt vectors {key!r} are not registered")
        return self._sets[key]

    def _unfit(self, vectors: Tensor) -> str | None:
        """Why the vectors cannot be used, or None."""
        if vectors.ndim != 2 or vectors.shape[1] != self._hidden_size:
            shape = list(vectors.shape)
            return f"shape {shape}, but the model needs [n, {self._hidden_size}]"
        if not vectors.is_floating_point() or not bool(vectors.float().isfinite().all()):
            return "not all values are finite floating-point numbers"
        return None
