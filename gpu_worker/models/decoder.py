"""One decoder for every family: what differs stands in the config and in the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nightjar import kernels
from nightjar.checkpoints import ModelConfig
from nightjar.gpu_worker.models.batch import KVTensors, TokenBatch
from nightjar.gpu_worker.models.rope import RopeTable
from nightjar.kernels import GatedWeight, LinearWeight


@dataclass(frozen=True, slots=True)
class NormWeights:
    """A norm: weight float32[H], and bias float32[H] where it is a layer norm."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block: attention (qkv packed as query, key, value) and feed-forward.

    up: with its gate where the config says `gated`; query and key norm: with `qk_norm`; post norms:
    with `post_norms`.
    """

    attention_norm: NormWeights
    qkv: LinearWeight
    query_norm: NormWeights | None
    key_norm: NormWeights | None
    attention_out: LinearWeight
    attention_post_norm: NormWeights | None
    mlp_norm: NormWeights
    up: LinearWeight | GatedWeight
    down: LinearWeight
    mlp_post_norm: NormWeights | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder: token table [V, H], positions as a learned table [P, H] or as
    rotations, blocks, last norm, LM head [V, H]."""

    tokens: Tensor
    positions: Tensor | None
    rope: RopeTable | None
    layers: tuple[LayerWeights, ...]
    last_norm: NormWeights
    head: LinearWeight


class Decoder:
    """Packed tokens in, hidden states of the wanted rows out; logits and scores from those."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        device: str,
    ) -> None:
        """dtype: activations and tables; cache_dtype: keys and values, as narrow at the most."""
        self.config = config
        self.weights = weights
        self.dtype = dtype
        self.cache_dtype = cache_dtype
        self.device = device

    def forward(self, batch: TokenBatch, cache: KVTensors) -> Tensor:
        """Run one step and write its keys and values into the cache.

        Returns the normalised last hidden states of batch.output_rows: dtype[N, H].
        """
        weights, parallel = self.weights, self.config.parallel_residual
        residual = self._embed(batch)
        angles = None if weights.rope is None else weights.rope.rows(batch.positions)
        delta: Tensor | None = None
        for index, layer in enumerate(weights.layers):
            x = self._norm(residual, delta, layer.attention_norm)
            x = self._attend(index, kernels.linear(x, layer.qkv), angles, batch, cache)
            if index == len(weights.layers) - 1:
                # Past the last attention no row looks at another: go on with the wanted ones.
                residual, x = residual[batch.output_rows], x[batch.output_rows]
            delta = self._output(x, layer.attention_out, layer.attention_post_norm)
            x = self._norm(residual, None if parallel else delta, layer.mlp_norm)
            if parallel:
                residual.add_(delta)
            delta = self._output(self._widen(x, layer), layer.down, layer.mlp_post_norm)
        return self._norm(residual, delta, weights.last_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary: [N, H] -> float32[N, V]."""
        return kernels.linear(hidden, self.weights.head).float()

    def token_nll(self, hidden: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood of targets[i] after hidden[rows[i]]: see kernels.token_nll."""
        return kernels.token_nll(hidden, self.weights.head, rows, targets)

    def allocate_cache(self, blocks: int, block_size: int) -> KVTensors:
        """An empty cache for `forward`."""
        return KVTensors.allocate(self.config, blocks, block_size, self.cache_dtype, self.device)

    def _embed(self, batch: TokenBatch) -> Tensor:
        """The residual stream at its beginning: float32[T, H]."""
        return kernels.embed(
            batch.token_ids,
            batch.positions,
            self.weights.tokens,
            self.weights.positions,
            batch.prompt_vectors,
            batch.vector_bases,
            self.config.embedding_multiplier,
        )

    def _norm(self, residual: Tensor, delta: Tensor | None, norm: NormWeights) -> Tensor:
        """Add the last block's output to the residual stream and normalise: dtype[T, H]."""
        epsilon = self.config.norm_epsilon
        if norm.bias is None:
            return kernels.rms_norm(residual, delta, norm.weight, epsilon, self.dtype)
        return kernels.layer_norm(residual, delta, norm.weight, norm.bias, epsilon, self.dtype)

    def _widen(self, x: Tensor, layer: LayerWeights) -> Tensor:
        """The feed-forward block up to its last projection: [T, H] -> [T, intermediate]."""
        if isinstance(layer.up, GatedWeight):
            return kernels.gated_linear(x, layer.up, self.config.activation)
        return kernels.linear(x, layer.up, self.config.activation)

    def _output(self, x: Tensor, weight: LinearWeight, post_norm: NormWeights | None) -> Tensor:
        """What half a block adds to the residual stream: [T, H]."""
        delta = self._join(x, weight)
        if post_norm is not None:
            epsilon = self.config.norm_epsilon
            wide = torch.promote_types(self.dtype, torch.float32)
            delta = kernels.rms_norm(delta, None, post_norm.weight, epsilon, wide)
        scale = self.config.residual_multiplier
        return delta if scale == 1.0 else kernels.widened(delta) * scale

    def _join(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """The projection of all heads, or of the widened rows, back to the stream: [T, H]."""
        return kernels.linear(x, weight)

    def _attend(
        self,
        index: int,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        batch: TokenBatch,
        cache: KVTensors,
    ) -> Tensor:
        """Attention of one layer: qkv [T, (Hq + 2 Hkv) * D] -> [T, Hq * D].

        angles: each row's cosines and sines, where positions are rotations.
        """
        config = self.config
        heads = qkv.view(qkv.shape[0], -1, config.head_size)
        sizes = [config.n_heads, config.n_kv_heads, config.n_kv_heads]
        q, k, v = torch.split(heads, sizes, dim=1)
        layer = self.weights.layers[index]
        if layer.query_norm is not None and layer.key_norm is not None:
            for part, norm in ((q, layer.query_norm), (k, layer.key_norm)):
                part.copy_(
                    kernels.rms_norm(part, None, norm.weight, config.norm_epsilon, self.dtype)
                )
        if angles is not None:
            kernels.rotary(heads[:, : config.n_heads + config.n_kv_heads], *angles)
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
