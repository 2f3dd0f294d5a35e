"""A decoder of any family whose inputs get gradients; its weights are frozen.

The engine's kernels work in place and know no gradients. This is the same arithmetic in torch, over
padded sequences. Rows after a sequence's end change nothing, because attention is causal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nightjar.checkpoints import ModelDirectory
from nightjar.checkpoints.weights import TENSOR_NAMES
from nightjar.gpu_worker.models.rope import RopeTable
from nightjar.gpu_worker.models.weight_reader import WeightReader

Projection = tuple[Tensor, Tensor | None]
"""A weight [out, in] and its bias [out]."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one block; norms are (weight, bias) in FP32."""

    attention_norm: Projection
    query_key_value: tuple[Projection, ...]
    head_norms: tuple[Projection, Projection] | None
    attention_out: Projection
    mlp_norm: Projection
    mlp_in: tuple[Projection, ...]
    mlp_out: Projection
    post_norms: tuple[Projection, Projection] | None


class FrozenModel:
    """All weights of a model directory, in one precision on one device."""

    def __init__(
        self, directory: ModelDirectory, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        """dtype: of the products; norms, residual stream and scores are in FP32 at least."""
        self.config = directory.config
        self.device = device
        self._dtype = dtype
        self._wide = torch.promote_types(dtype, torch.float32)
        self._names = TENSOR_NAMES[directory.config.family]
        self._reader = WeightReader(directory)
        config, names = self.config, self._names
        self.table = self._reader.tensor(f"{names.tokens}.weight", dtype, device)
        self._positions: Tensor | None = None
        self._rope: RopeTable | None = None
        if config.rope is None:
            self._positions = self._reader.tensor(f"{names.positions}.weight", self._wide, device)
        else:
            self._rope = RopeTable.build(config.rope, config.context_length, device)
        self._layers = [self._layer(f"{names.layer}.{i}.") for i in range(config.n_layers)]
        self._last_norm = self._norm(names.last_norm)
        self._head = self.table
        if not config.tied_embeddings:
            self._head = self._reader.tensor(f"{names.head}.weight", dtype, device)

    @property
    def parameters(self) -> int:
        """How many numbers the weights hold."""
        kept = [self.table, self._last_norm[0], self._last_norm[1], self._positions]
        kept += [] if self.config.tied_embeddings else [self._head]
        for layer in self._layers:
            groups = (layer.query_key_value, layer.mlp_in, layer.head_norms, layer.post_norms)
            pairs = [pair for group in groups for pair in group or ()]
            pairs += [layer.attention_norm, layer.attention_out, layer.mlp_norm, layer.mlp_out]
            kept += [tensor for pair in pairs for tensor in pair]
        return sum(tensor.numel() for tensor in kept if tensor is not None)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the token table's rows of ids int64[...]: float32[..., H], not scaled."""
        return F.embedding(ids, self.table).to(self._wide)

    def hidden(self, rows: Tensor) -> Tensor:
        """Return the normalised last states [B, T, H] after input rows [B, T, H]."""
        config = self.config
        x = rows.to(self._wide) * config.embedding_multiplier
        if self._positions is not None:
            x = x + self._positions[: rows.shape[1]]
        for number, layer in enumerate(self._layers):
            attended = self._attend(number, layer, self._normed(x, layer.attention_norm))
            if layer.post_norms is not None:
                attended = self._normed(attended, layer.post_norms[0]).to(self._wide)
            attended = attended * config.residual_multiplier
            if not config.parallel_residual:
                x = x + attended
            added = self._feed_forward(layer, self._normed(x, layer.mlp_norm))
            if layer.post_norms is not None:
                added = self._normed(added, layer.post_norms[1]).to(self._wide)
            x = x + added * config.residual_multiplier
            if config.parallel_residual:
                x = x + attended
        return self._normed(x, self._last_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores over the vocabulary after states [N, H]: [N, V] in FP32 at least."""
        return (hidden @ self._head.T).to(self._wide) * self.config.logits_multiplier

    def _attend(self, number: int, layer: _Layer, x: Tensor) -> Tensor:
        config, (batch, length, _) = self.config, x.shape
        query, key, value = (
            F.linear(x, *one).view(batch, length, -1, config.head_size)
            for one in layer.query_key_value
        )
        if layer.head_norms is not None:
            query = self._normed(query, layer.head_norms[0])
            key = self._normed(key, layer.head_norms[1])
        if self._rope is not None:
            query, key = self._rotated(query), self._rotated(key)
        groups = config.n_heads // config.n_kv_heads
        key, value = (one.repeat_interleave(groups, 2) for one in (key, value))
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            scale=config.attention_scales[number],
        )
        joined = attended.transpose(1, 2).reshape(batch, length, -1)
        return F.linear(joined, *layer.attention_out).to(self._wide)

    def _feed_forward(self, layer: _Layer, x: Tensor) -> Tensor:
        activation = _ACTIVATIONS[self.config.activation]
        inner = activation(F.linear(x, *layer.mlp_in[0]))
        if self.config.gated:
            inner = inner * F.linear(x, *layer.mlp_in[1])
        return F.linear(inner, *layer.mlp_out).to(self._wide)

    def _rotated(self, x: Tensor) -> Tensor:
        """Rotate heads [B, T, heads, D]: channel i with channel i + n."""
        if self._rope is None:
            return x
        length, n = x.shape[1], self._rope.cosines.shape[1]
        cosines = self._rope.cosines[:length, None].to(self._wide)
        sines = self._rope.sines[:length, None].to(self._wide)
        first, second = x[..., :n].to(self._wide), x[..., n : 2 * n].to(self._wide)
        turned = (first * cosines - second * sines, second * cosines + first * sines)
        return torch.cat((torch.cat(turned, -1).to(x.dtype), x[..., 2 * n :]), -1)

    def _normed(self, x: Tensor, norm: Projection) -> Tensor:
        weight, bias = norm
        epsilon, wide = self.config.norm_epsilon, x.to(self._wide)
        if self.config.norm == "layer_norm":
            return F.layer_norm(wide, wide.shape[-1:], weight, bias, epsilon).to(self._dtype)
        return F.rms_norm(wide, wide.shape[-1:], weight, epsilon).to(self._dtype)

    def _layer(self, root: str) -> _Layer:
        names, config = self._names, self.config
        heads, posts = None, None
        if config.qk_norm:
            heads = self._norm(root + names.qk_norms[0]), self._norm(root + names.qk_norms[1])
        if config.post_norms:
            posts = self._norm(root + names.post_norms[0]), self._norm(root + names.post_norms[1])
        return _Layer(
            attention_norm=self._norm(root + names.attention_norm),
            query_key_value=self._query_key_value(root),
            head_norms=heads,
            attention_out=self._parts(root + names.attention_out, config.attention_out_bias),
            mlp_norm=self._norm(root + names.mlp_norm),
            mlp_in=tuple(self._parts(root + name, config.mlp_bias) for name in names.mlp_in),
            mlp_out=self._parts(root + names.mlp_out, config.mlp_bias),
            post_norms=posts,
        )

    def _query_key_value(self, root: str) -> tuple[Projection, ...]:
        """Return the projections of queries, keys and values."""
        config, names = self.config, self._names
        parts = [self._parts(root + name, config.qkv_bias) for name in names.query_key_value]
        if len(parts) == 3:
            return tuple(parts)
        ((weight, bias),) = parts
        if not names.interleaved:
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            return tuple(zip(weight.chunk(3), biases, strict=True))
        by_head = weight.view(config.n_heads, 3, config.head_size, -1)
        weights = [by_head[:, part].flatten(0, 1) for part in range(3)]
        if bias is None:
            return tuple((one, None) for one in weights)
        of_head = bias.view(config.n_heads, 3, config.head_size)
        return tuple((weights[part], of_head[:, part].flatten()) for part in range(3))

    def _parts(self, name: str, has_bias: bool) -> Projection:
        weight = self._reader.tensor(f"{name}.weight", self._dtype, self.device)
        bias = None
        if has_bias:
            bias = self._reader.tensor(f"{name}.bias", self._dtype, self.device)
        return weight.t() if self._names.input_major else weight, bias

    def _norm(self, name: str) -> Projection:
        weight = self._reader.tensor(f"{name}.weight", self._wide, self.device)
        bias = None
        if self.config.norm == "layer_norm":
            bias = self._reader.tensor(f"{name}.bias", self._wide, self.device)
        return weight, bias
