"""The prompt vectors that requests may name."""

from __future__ import annotations

import torch
from torch import Tensor


class PromptVectorStore:
    """All registered vectors in one table, each set under its key.

    rows: [R, H] of the model's dtype on its device, or None while nothing is registered.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: str = "cpu") -> None:
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._spans: dict[str, tuple[int, int]] = {}
        self._refused: dict[str, str] = {}
        self.rows: Tensor | None = None

    def register(self, key: str, vectors: Tensor) -> None:
        """Store vectors [n, H] under a key; running requests keep the vectors they started with.

        The same vectors under the same key again cost nothing.
        A set that does not fit the model is noted as refused: each request that names it fails
        with the reason.
        """
        reason = self._unfit(vectors)
        known = self._known(key)
        self._refused.pop(key, None)
        if reason is not None:
            self._spans.pop(key, None)
            self._refused[key] = f"prompt vectors {key!r}: {reason}"
            return
        new = vectors.detach().to(self._device, self._dtype)
        if known is not None and torch.equal(known, new):
            return
        start = 0 if self.rows is None else self.rows.shape[0]
        self.rows = new.clone() if self.rows is None else torch.cat((self.rows, new))
        self._spans[key] = (start, vectors.shape[0])

    def span(self, key: str | None) -> tuple[int, int]:
        """Return the first row and the number of rows under a key; (0, 0) for no key.

        Raises KeyError, with the reason as its message, for a key that is unknown or refused.
        """
        if key is None:
            return 0, 0
        if key in self._refused:
            raise KeyError(self._refused[key])
        if key not in self._spans:
            raise KeyError(f"prompt vectors {key!r} are not registered")
        return self._spans[key]

    def _known(self, key: str) -> Tensor | None:
        """The vectors stored under a key."""
        if self.rows is None or key not in self._spans:
            return None
        start, count = self._spans[key]
        return self.rows[start : start + count]

    def _unfit(self, vectors: Tensor) -> str | None:
        """Why the vectors cannot be used, or None."""
        if vectors.ndim != 2 or vectors.shape[1] != self._hidden_size:
            shape = list(vectors.shape)
            return f"shape {shape}, but the model needs [n, {self._hidden_size}]"
        if not vectors.is_floating_point() or not bool(vectors.isfinite().all()):
            return "not all values are finite floating-point numbers"
        return None
