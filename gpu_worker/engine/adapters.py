"""The LoRA adapters that requests may name, and what a request is tuned with.

Their factors lie on the model's device. The worker decides which adapters stay here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from torch import Tensor

from nightjar.checkpoints import ModelConfig
from nightjar.checkpoints.adapters import unfit
from nightjar.gpu_worker.engine.errors import RefusedError
from nightjar.gpu_worker.engine.prompt_vectors import PromptVectors, PromptVectorStore
from nightjar.gpu_worker.engine.registered import Registered
from nightjar.gpu_worker.models import LoraAdapter
from nightjar.requests import Request


class AdapterStore(Registered[LoraAdapter]):
    """The adapters by key; several engines over one model may share a store."""

    kind = "LoRA adapter"

    def __init__(self, config: ModelConfig, device: str, closed: str | None) -> None:
        """closed: why the model takes no adapter; None where it does."""
        super().__init__()
        self._config = config
        self._device = device
        self._closed = closed

    def register(self, key: str, factors: Mapping[str, Tensor]) -> None:
        """Store a copy of an adapter's factors under a key, in place of earlier ones.

        factors: named as `checkpoints.adapters` does.  Factors that do not fit the model are noted
        as refused: each request that names the adapter fails with the reason.
        """
        reason = self._closed or unfit(factors, self._config)
        if reason is None and not all(bool(one.isfinite().all()) for one in factors.values()):
            reason = "not all values are finite"
        if reason is None:
            self.keep(key, LoraAdapter.of(factors, self._config, self._device))
        else:
            self.refuse(key, reason)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What changes a request's model: prompt vectors in its tokens, an adapter of its weights."""

    vectors: PromptVectors | None = None
    adapter: LoraAdapter | None = None

    def salt(self, *, reads_vectors: bool) -> int:
        """Return what decides keys and values beside the tokens; 0 for nothing."""
        own = self.vectors.salt if reads_vectors and self.vectors is not None else 0
        if self.adapter is None:
            return own
        both = own.to_bytes(16, "little") + self.adapter.salt.to_bytes(16, "little")
        return int.from_bytes(blake2b(both, digest_size=15).digest(), "little") or 1


class Tunings:
    """The prompt vectors and adapters by key; several engines over one model may share them."""

    def __init__(
        self, config: ModelConfig, device: str = "cpu", no_adapters: str | None = None
    ) -> None:
        """config, device, no_adapters: the model's, see Decoder."""
        self.vectors = PromptVectorStore(config.hidden_size)
        self.adapters = AdapterStore(config, device, no_adapters)

    def forget(self, key: str) -> None:
        """Drop a key; requests that run keep what they started with."""
        self.vectors.forget(key)
        self.adapters.forget(key)

    def find(self, request: Request) -> Tuning:
        """Return what a request names.

        Raises:
            RefusedError: It is unknown, or does not fit the model.
        """
        try:
            vectors = self.vectors.find(request.prompt_vectors)
        except KeyError as error:
            raise RefusedError("unknown_prompt_vectors", str(error.args[0])) from error
        try:
            adapter = self.adapters.find(request.adapter)
        except KeyError as error:
            raise RefusedError("unknown_adapter", str(error.args[0])) from error
        return Tuning(vectors, adapter)
