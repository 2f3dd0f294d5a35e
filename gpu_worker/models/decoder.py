"""One decoder for all families: config and weights hold the differences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from nightjar import kernels
from nightjar.checkpoints import ModelConfig
from nightjar.gpu_worker.models.batch import KVTensors, TokenBatch
from nightjar.gpu_worker.models.decode_steps import DecodeSteps, StepSettings
from nightjar.gpu_worker.models.graphs import CudaGraphs, Recorder
from nightjar.gpu_worker.models.rope import RopeTable
from nightjar.kernels import (
    Added,
    HeadNorms,
    Layers,
    LayerWeights,
    LinearWeight,
    Norm,
    Rotation,
    StepRows,
    TokenTable,
)


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder.

    Positions are a learned table [P, H] or rotations.  The LM head [V, H] may be the token table
    [V, H] itself.
    """

    tokens: TokenTable
    positions: Tensor | None
    rope: RopeTable | None
    layers: tuple[LayerWeights, ...]
    last_norm: Norm
    head: LinearWeight


class Decoder:
    """Computes hidden states of wanted rows from packed tokens, and from those logits and NLLs.

    in_lockstep: whether other processes compute every step with this one and must be told of it;
    is_whole: whether its products are whole, not parts of sums over several processes;
    free_elsewhere: free bytes of those processes' GPUs after loading the model;
    no_adapters: why the decoder cannot compute with LoRA adapters; None where it can.
    """

    in_lockstep = False
    is_whole = True
    free_elsewhere: tuple[int, ...] = ()
    no_adapters: str | None = None

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        device: str,
    ) -> None:
        """dtype: of activations and tables; cache_dtype: of keys and values, at most as wide.

        A cache in FP8 rounds them further.
        """
        self.config = config
        layers, head = kernels.chained(weights.layers, weights.head)
        self.weights = replace(weights, layers=layers, head=head)
        self.dtype = dtype
        self.cache_dtype = cache_dtype
        self.device = device

    def forward(self, batch: TokenBatch, cache: KVTensors) -> Tensor:
        """Run one step and write its keys and values into the cache.

        Returns the normalised last hidden states of batch.output_rows: dtype[N, H].
        """
        weights, parallel = self.weights, self.config.parallel_residual
        residual = self._embed(batch)
        rotation = None if weights.rope is None else weights.rope.at(batch.positions)
        rows = StepRows(batch.prefill, batch.decode, batch.branch)
        wanted = None if batch.wants_all else batch.output_rows
        delta: Tensor | None = None
        adapted = batch.adapted
        done = self._run_at_once(residual, rotation, batch, rows, cache)
        for index, layer in enumerate(weights.layers[done:], done):
            is_last = index == len(weights.layers) - 1
            if is_last:
                rows = replace(rows, wanted=wanted)
            added = None if adapted is None else adapted.added(index)
            # Heads are kept no wider than the cache keeps them.
            qkv = kernels.normed_linear(
                residual, delta, layer.attention_norm, layer.qkv, self.cache_dtype, added
            )
            x = self._attend(index, qkv, rotation, batch, rows, cache)
            del qkv  # else the next layer's would need room beside it
            if is_last and wanted is not None:
                # After the last attention no row reads another one: continue with the wanted rows.
                residual, x = residual.index_select(0, wanted), x.index_select(0, wanted)
                adapted = None if adapted is None else adapted.within(wanted)
                added = None if adapted is None else adapted.added(index)
            attended = self._attention_out(residual, x, layer, added)
            del x
            delta = self._feed_forward(residual, None if parallel else attended, layer, added)
            if parallel and attended is not None:
                residual.add_(attended)
        return kernels.normalize(residual, delta, weights.last_norm, self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute scores over the vocabulary: [N, H] -> float32[N, V]."""
        return kernels.linear(hidden, self.weights.head, out_dtype=torch.float32)

    def token_nll(self, hidden: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood of targets[i] after hidden[rows[i]]: see kernels.token_nll."""
        return kernels.token_nll(hidden, self.weights.head, rows, targets)

    def allocate_cache(self, blocks: int, block_size: int, *, fp8: bool = False) -> KVTensors:
        """Make an empty cache for `forward`; fp8: of keys and values in FP8."""
        shape = self.config, blocks, block_size, self.cache_dtype
        return KVTensors.allocate(*shape, self.device, fp8=fp8)

    def decode_steps(self, cache: KVTensors, settings: StepSettings) -> DecodeSteps:
        """Make what runs decode steps on the device, in windows."""
        return DecodeSteps(self, cache, settings)

    def recorder(self, most_bytes: int) -> Recorder:
        """Return what records steps on a GPU; a step takes up to so many bytes meanwhile."""
        return CudaGraphs(most_bytes)

    def _embed(self, batch: TokenBatch) -> Tensor:
        """Compute the residual stream before the first layer: float32[T, H]."""
        return kernels.embed(
            batch.token_ids,
            batch.positions,
            self.weights.tokens,
            self.weights.positions,
            batch.prompt_vectors,
            batch.vector_bases,
            self.config.embedding_multiplier,
        )

    def _run_at_once(
        self,
        residual: Tensor,
        rotation: Rotation | None,
        batch: TokenBatch,
        rows: StepRows,
        cache: KVTensors,
    ) -> int:
        """Run the first layers, of which every row is wanted, in one call; return how many."""
        if self._layers is None or batch.arrivals is not None:
            return 0
        count = len(self.weights.layers) - (not batch.wants_all)
        write = cache.written(batch.write_blocks, batch.write_offsets)
        done = kernels.run_layers(
            self._layers, count, residual, rotation, write, rows, batch.adapted
        )
        return count if done else 0

    @cached_property
    def _layers(self) -> Layers | None:
        """All layers for `run_layers`; None where their halves do not add to the stream in turn."""
        if not self._adds_onto:
            return None
        config = self.config
        return Layers(self.weights.layers, config.attention_scales, config.activation)

    @property
    def _adds_onto(self) -> bool:
        """Whether half a block adds only its last projection to the residual stream.

        No other half may read the stream meanwhile.
        """
        config = self.config
        plain = config.residual_multiplier == 1.0 and not config.post_norms
        return self.is_whole and plain and not config.parallel_residual

    def _attention_out(
        self, residual: Tensor, x: Tensor, layer: LayerWeights, added: Added | None
    ) -> Tensor | None:
        """Add the attention's result x [T, Hq * D], or return what is still to be added."""
        weight = layer.attention_out
        if self._adds_onto:
            return kernels.linear_onto(residual, x, weight, added)
        if added is None:
            part = kernels.linear(x, weight)
        else:
            part = kernels.adapted_linear(x, weight, added)
        return self._output(self._joined(part), layer.attention_post_norm)

    def _feed_forward(
        self, residual: Tensor, delta: Tensor | None, layer: LayerWeights, added: Added | None
    ) -> Tensor | None:
        """Add delta and then the feed-forward half, or return what is still to be added."""
        norm, up, down = layer.mlp_norm, layer.up, layer.down
        weights = norm, up, down, self.config.activation, self.dtype
        if added is not None:
            if delta is not None:
                residual.add_(delta)
            if self._adds_onto:
                return kernels.adapted_feed_forward_onto(residual, *weights, added)
            part = kernels.adapted_feed_forward(residual, *weights, added)
        elif self._adds_onto:
            return kernels.feed_forward_onto(residual, delta, *weights)
        else:
            part = kernels.feed_forward(residual, delta, *weights)
        return self._output(self._joined(part), layer.mlp_post_norm)

    def _joined(self, part: Tensor) -> Tensor:
        """Return the whole projection back to the residual stream, given this decoder's part."""
        return part

    def _output(self, delta: Tensor, post_norm: Norm | None) -> Tensor:
        """Return what half a block adds to the stream, given its last projection: [T, H]."""
        if post_norm is not None:
            wide = torch.promote_types(self.dtype, torch.float32)
            # Widened first, as what adapters add to is: norms of other dtypes sum in another order.
            delta = kernels.normalize(kernels.widened(delta), None, post_norm, wide)
        scale = self.config.residual_multiplier
        return delta if scale == 1.0 else kernels.widened(delta) * scale

    def _attend(
        self,
        index: int,
        qkv: Tensor,
        rotation: Rotation | None,
        batch: TokenBatch,
        rows: StepRows,
        cache: KVTensors,
    ) -> Tensor:
        """Compute the attention of one layer: qkv [T, (Hq + 2 Hkv) * D] -> [T, Hq * D]."""
        if batch.arrivals is not None:
            batch.arrivals.wait(index)
        write = cache.written(batch.write_blocks, batch.write_offsets, index)
        heads = qkv.view(qkv.shape[0], -1, self.config.head_size)
        scale = self.config.attention_scales[index]
        out = kernels.attend(heads, self._head_norms(index), rotation, write, rows, scale)
        return out.flatten(1)

    def _head_norms(self, index: int) -> HeadNorms | None:
        """Return the norms of one layer's queries and keys, where the family has them."""
        layer = self.weights.layers[index]
        if layer.query_norm is None or layer.key_norm is None:
            return None
        epsilon = self.config.norm_epsilon
        return HeadNorms(layer.query_norm.weight, layer.key_norm.weight, epsilon)
