"""One decoder for every family: what differs stands in the config and in the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nightjar import kernels
from nightjar.checkpoints import ModelConfig
from nightjar.gpu_worker.models.batch import KVTensors, TokenBatch
from nightjar.kernels import LinearWeight


@dataclass(frozen=True, slots=True)
class NormWeights:
    """A layer norm: weight and bias, float32[H]."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block: attention (qkv packed as query, key, value) and feed-forward."""

    attention_norm: NormWeights
    qkv: LinearWeight
    attention_out: LinearWeight
    mlp_norm: NormWeights
    up: LinearWeight
    down: LinearWeight


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder: tables [V, H] and [P, H], blocks, last norm, LM head [V, H]."""

    tokens: Tensor
    positions: Tensor
    layers: tuple[LayerWeights, ...]
    last_norm: NormWeights
    head: LinearWeight


class Decoder:
    """Packed tokens in, hidden states of the wanted rows out; logits and scores from those."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, dtype: torch.dtype, device: str
    ) -> None:
        self.config = config
        self.weights = weights
        self.dtype = dtype
        self.device = device

    def forward(self, batch: TokenBatch, cache: KVTensors) -> Tensor:
        """Run one step and write its keys and values into the cache.

        Returns the normalised last hidden states of batch.output_rows: dtype[N, H].
        """
        weights = self.weights
        residual = kernels.embed(
            batch.token_ids,
            batch.positions,
            weights.tokens,
            weights.positions,
            batch.prompt_vectors,
            batch.vector_bases,
        )
        delta: Tensor | None = None
        for index, layer in enumerate(weights.layers):
            x = self._norm(residual, delta, layer.attention_norm)
            x = self._attend(index, kernels.linear(x, layer.qkv), batch, cache)
            if index == len(weights.layers) - 1:
                # Past the last attention no row looks at another: go on with the wanted ones.
                residual, x = residual[batch.output_rows], x[batch.output_rows]
            delta = kernels.linear(x, layer.attention_out)
            x = self._norm(residual, delta, layer.mlp_norm)
            x = kernels.linear(x, layer.up, self.config.activation)
            delta = kernels.linear(x, layer.down)
        return self._norm(residual, delta, weights.last_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary: [N, H] -> float32[N, V]."""
        return kernels.linear(hidden, self.weights.head).float()

    def token_nll(self, hidden: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood of targets[i] after hidden[rows[i]]: see kernels.token_nll."""
        return kernels.token_nll(hidden, self.weights.head, rows, targets)

    def _norm(self, residual: Tensor, delta: Tensor | None, norm: NormWeights) -> Tensor:
        """Add the last block's output to the residual stream and normalise: dtype[T, H]."""
        return kernels.layer_norm(
            residual, delta, norm.weight, norm.bias, self.config.norm_epsilon, self.dtype
        )

    def _attend(self, index: int, qkv: Tensor, batch: TokenBatch, cache: KVTensors) -> Tensor:
        """Attention of one layer: qkv [T, (Hq + 2 Hkv) * D] -> [T, Hq * D]."""
        config = self.config
        heads = qkv.view(qkv.shape[0], -1, config.head_size)
        sizes = [config.n_heads, config.n_kv_heads, config.n_kv_heads]
        q, k, v = torch.split(heads, sizes, dim=1)
        keys, values = cache.keys[index], cache.values[index]
        scale = config.attention_scales[index]
        prefill, cached = batch.prefill_rows, batch.cached_rows
        if cached:
            kernels.kv_write(
                keys, values, k[:cached], v[:cached], batch.write_blocks, batch.write_offsets
            )
        parts = []
        if batch.prefill is not None:
            parts.append(kernels.prefill_attention(q[:prefill], keys, values, batch.prefill, scale))
        if batch.decode is not None:
            parts.append(
                kernels.decode_attention(q[prefill:cached], keys, values, batch.decode, scale)
            )
        if batch.branch is not None:
            own = q[cached:], k[cached:], v[cached:]
            parts.append(kernels.branch_attention(*own, keys, values, batch.branch, scale))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.flatten(1)
