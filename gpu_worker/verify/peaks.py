"""The largest numbers that a model's products give on plain text: FP16 ends at 65,504."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nightjar import kernels
from nightjar.gpu_worker.models import Decoder
from nightjar.gpu_worker.models.batch import KVTensors, TokenBatch
from nightjar.kernels import Added, LayerWeights, Norm, Rotation, StepRows

FP16_MAX = 65_504.0
PRODUCTS = (
    *("attention-input", "query", "key", "value", "attention-output"),
    *("mlp-input", "up", "down", "residual", "last"),
)
"""The inputs are normalised rows; `last` is the output of the last norm."""
KEPT_IN_FP32 = ("attention-output", "down", "residual")
"""They are added up in FP32 in every precision."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest absolute output of a product of one layer."""

    layer: int
    product: str
    largest: float

    @property
    def overflows(self) -> bool:
        """Whether FP16 cannot hold it, and it is kept in FP16 without a plan."""
        return self.product not in KEPT_IN_FP32 and not self.largest <= FP16_MAX


class WatchedDecoder(Decoder):
    """A decoder that notes the largest absolute number of each place; in FP32, on the CPU."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(
            decoder.config, decoder.weights, decoder.dtype, decoder.cache_dtype, decoder.device
        )
        self._largest: dict[tuple[int, str], float] = {}
        self._layer = 0

    def peaks(self) -> list[Peak]:
        """Return the peaks of all layers so far."""
        return [Peak(layer, name, value) for (layer, name), value in sorted(self._largest.items())]

    def _note(self, product: str, values: Tensor) -> None:
        key = self._layer, product
        largest = float(values.abs().max()) if values.numel() else 0.0
        # A NaN stays: no later number is larger.
        if not largest <= self._largest.get(key, 0.0):
            self._largest[key] = largest

    def _run_at_once(
        self,
        residual: Tensor,
        rotation: Rotation | None,
        batch: TokenBatch,
        rows: StepRows,
        cache: KVTensors,
    ) -> int:
        """Run no layer in one call: each product is watched."""
        return 0

    def _attend(
        self,
        index: int,
        qkv: Tensor,
        rotation: Rotation | None,
        batch: TokenBatch,
        rows: StepRows,
        cache: KVTensors,
    ) -> Tensor:
        self._layer = index
        heads, keys = self.config.n_heads, self.config.n_kv_heads
        sizes = [count * self.config.head_size for count in (heads, keys, keys)]
        for name, part in zip(("query", "key", "value"), torch.split(qkv, sizes, 1), strict=True):
            self._note(name, part)
        return super()._attend(index, qkv, rotation, batch, rows, cache)

    def forward(self, batch: TokenBatch, cache: KVTensors) -> Tensor:
        """As Decoder says."""
        hidden = super().forward(batch, cache)
        self._note("last", hidden)
        return hidden

    def _attention_out(
        self, residual: Tensor, x: Tensor, layer: LayerWeights, added: Added | None
    ) -> Tensor | None:
        self._note("attention-input", self._normalized(residual, None, layer.attention_norm))
        self._note("attention-output", kernels.linear(x, layer.attention_out))
        return super()._attention_out(residual, x, layer, added)

    def _feed_forward(
        self, residual: Tensor, delta: Tensor | None, layer: LayerWeights, added: Added | None
    ) -> Tensor | None:
        self._note("mlp-input", self._normalized(residual, delta, layer.mlp_norm))
        stream = residual.clone()
        up = kernels.normed_linear(stream, delta, layer.mlp_norm, layer.up, self.dtype)
        self._note("up", up)
        before = stream if delta is not None else residual.clone()
        made = super()._feed_forward(residual, delta, layer, added)
        self._note("down", residual - before if made is None else made)
        self._note("residual", residual)
        return made

    def _normalized(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """Return the normalised rows; the stream stays as it is."""
        return kernels.normalize(residual.clone(), delta, norm, self.dtype)
