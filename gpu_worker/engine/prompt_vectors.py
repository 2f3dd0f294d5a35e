"""The prompt vectors that requests may name, in host memory.

A step uploads the rows that it reads, and nothing stays on the device. So a GPU holds no table of
them, however many are registered. The worker decides which vectors stay here.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from nightjar.gpu_worker.engine.registered import Registered


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


class PromptVectorStore(Registered[PromptVectors]):
    """The sets of vectors by key; several engines over one model may share a store."""

    kind = "prompt vectors"

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self._hidden_size = hidden_size

    def register(self, key: str, vectors: Tensor) -> None:
        """Store a copy of vectors [n, H] under a key, in place of earlier ones.

        Requests that run keep the vectors that they started with.
        A set that does not fit the model is noted as refused: each request that names it fails
        with the reason.
        """
        reason = self._unfit(vectors)
        if reason is None:
            self.keep(key, PromptVectors.of(vectors))
        else:
            self.refuse(key, reason)

    def _unfit(self, vectors: Tensor) -> str | None:
        """Why the vectors cannot be used, or None."""
        if vectors.ndim != 2 or vectors.shape[1] != self._hidden_size:
            shape = list(vectors.shape)
            return f"shape {shape}, but the model needs [n, {self._hidden_size}]"
        if not vectors.is_floating_point() or not bool(vectors.float().isfinite().all()):
            return "not all values are finite floating-point numbers"
        return None
