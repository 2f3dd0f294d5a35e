"""Loads a decoder from a checked model directory.

`checkpoints/weights.py` says how a family names and lays out its tensors.  Here they are brought
into the one layout that the decoder computes with.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from nightjar import kernels
from nightjar.checkpoints import CheckpointError, ModelConfig, ModelDirectory
from nightjar.checkpoints.weights import TENSOR_NAMES
from nightjar.gpu_worker.models.decoder import Decoder, DecoderWeights
from nightjar.gpu_worker.models.precision import (
    GPU_PRECISIONS,
    PRECISIONS,
    Precision,
    precision_of,
)
from nightjar.gpu_worker.models.rope import RopeTable
from nightjar.gpu_worker.models.split import Part, channels
from nightjar.gpu_worker.models.weight_reader import WeightReader
from nightjar.kernels import LayerWeights, LinearWeight, Norm
from nightjar.kernels.device import HEAD_SIZES, MAX_VOCAB

_ALL = slice(None)


def load_model(
    directory: ModelDirectory, dtype: str, device: str = "cpu", part: Part | None = None
) -> Decoder:
    """Load the weights of a model directory, which has checked them against its config.

    dtype: "fp64", "fp32", "bf16" or "fp16", the storage of weights, activations and cache.  "int8"
    multiplies in bytes (see kernels.pack_linear), caches in FP16 and keeps the rest in FP32.
    "bf16" does the same in bfloat16 on a CPU with instructions for its products.  A GPU computes
    in fp32, bf16 and fp16.
    part: what a ShardDecoder loads; nothing else is read.

    Raises:
        CheckpointError: The GPU has no kernels for the model's heads or for so many tokens.
        ValueError: An unknown dtype, or not one of the device's.
    """
    if dtype not in PRECISIONS:
        raise ValueError(f"dtype {dtype!r}: one of {', '.join(PRECISIONS)}")
    precision = precision_of(dtype, device)
    if device != "cpu":
        _check_gpu(directory.config, dtype, device)
    part = part or Part.of(directory.config)
    config = part.config(directory.config)
    with torch.inference_mode():
        weights = _Loader(config, WeightReader(directory), precision, device, part).weights()
    _give_memory_back()
    return Decoder(config, weights, precision.dtype, precision.cache, device)


def _give_memory_back() -> None:
    """Return memory to the system that reading and packing have freed.

    glibc would keep up to two copies of the largest weights as long as the process runs.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _check_gpu(config: ModelConfig, dtype: str, device: str) -> None:
    """Refuse a model that the CUDA kernels do not compute, before anything is read."""
    if dtype not in GPU_PRECISIONS:
        known = ", ".join(GPU_PRECISIONS)
        raise ValueError(f"dtype {dtype!r} is not computed on {device}: use one of {known}")
    if config.head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        raise CheckpointError(
            f"the model's heads have {config.head_size} channels, and on {device} there are "
            f"kernels for {sizes}: compute it on the CPU"
        )
    if config.vocab_size > MAX_VOCAB:
        raise CheckpointError(
            f"the model has {config.vocab_size} tokens, and on {device} there are kernels for "
            f"{MAX_VOCAB} at most: compute it on the CPU"
        )


class _Loader:
    """Reads and packs the weights of one model, or of one part; norms are in FP32 at least."""

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        precision: Precision,
        device: str,
        part: Part,
    ) -> None:
        """config: that of the part."""
        self._config = config
        self._names = TENSOR_NAMES[config.family]
        self._reader = reader
        self._precision = precision
        self._device = device
        self._part = part

    def weights(self) -> DecoderWeights:
        """All weights of the decoder."""
        config, names, part = self._config, self._names, self._part
        table = self._vocabulary(names.tokens)
        tokens = table
        if part.ranks > 1:  # one row of zeros for all tokens of other ranks
            tokens = torch.cat((table, table.new_zeros(1, config.hidden_size)))
            table = tokens[:-1]
        positions, rope = None, None
        if config.rope is not None:
            rope = RopeTable.build(config.rope, config.context_length, self._device)
        elif part.is_first:
            positions = self._tensor(f"{names.positions}.weight")
        layers = tuple(self._layer(f"{names.layer}.{i}.") for i in range(config.n_layers))
        last_norm = self._norm(names.last_norm)
        # The scores are linear in the last norm's result: its weights take the scores' multiplier.
        for weight in (last_norm.weight, last_norm.bias):
            if weight is not None:
                weight.mul_(config.logits_multiplier)
        head = self._pack(table if config.tied_embeddings else self._vocabulary(names.head), None)
        return DecoderWeights(
            tokens=kernels.tied_table(tokens, head) if config.tied_embeddings else tokens,
            positions=positions,
            rope=rope,
            layers=layers,
            last_norm=last_norm,
            head=head,
        )

    def _vocabulary(self, name: str) -> Tensor:
        """Return the part's rows of the embedding table or of the LM head."""
        return self._tensor(f"{name}.weight", self._part.tokens)

    def _layer(self, root: str) -> LayerWeights:
        """Load one block; root: the beginning of its tensors' names."""
        config, names = self._config, self._names
        query_norm, key_norm, attention_post_norm, mlp_post_norm = None, None, None, None
        if config.qk_norm:
            query_norm, key_norm = (self._norm(root + name) for name in names.qk_norms)
        if config.post_norms:
            attention_post_norm, mlp_post_norm = (
                self._norm(root + name) for name in names.post_norms
            )
        return LayerWeights(
            attention_norm=self._norm(root + names.attention_norm),
            qkv=self._query_key_value(root),
            query_norm=query_norm,
            key_norm=key_norm,
            attention_out=self._joining(
                root + names.attention_out,
                config.attention_out_bias,
                channels(self._part.heads, config.head_size),
            ),
            attention_post_norm=attention_post_norm,
            mlp_norm=self._norm(root + names.mlp_norm),
            up=self._widening(root),
            down=self._joining(root + names.mlp_out, config.mlp_bias, self._part.inner),
            mlp_post_norm=mlp_post_norm,
        )

    def _tensor(self, name: str, *ranges: slice) -> Tensor:
        return self._reader.tensor(name, self._precision.dtype, self._device, *ranges)

    def _pack(self, weight: Tensor, bias: Tensor | None) -> LinearWeight:
        return self._precision.pack(weight, bias)

    def _norm(self, name: str) -> Norm:
        """Load a norm, with a bias where the config's norms have one."""
        dtype = torch.promote_types(self._precision.dtype, torch.float32)
        weight = self._reader.tensor(f"{name}.weight", dtype, self._device)
        bias = None
        if self._config.norm == "layer_norm":
            bias = self._reader.tensor(f"{name}.bias", dtype, self._device)
        return Norm(weight, bias, self._config.norm_epsilon)

    def _parts(
        self, name: str, bias: bool, *, outputs: slice = _ALL, inputs: slice = _ALL
    ) -> tuple[Tensor, Tensor | None]:
        """Read a projection's weight [out, in] and bias [out], both in the ranges."""
        if self._names.input_major:
            weight = self._tensor(f"{name}.weight", inputs, outputs).t()
        else:
            weight = self._tensor(f"{name}.weight", outputs, inputs)
        return weight, self._tensor(f"{name}.bias", outputs) if bias else None

    def _joining(self, name: str, bias: bool, inputs: slice) -> LinearWeight:
        """Load a projection back to the residual stream, from the part's inputs.

        The ranks' outputs are summed, so only the first rank has the bias.
        """
        return self._pack(*self._parts(name, bias and self._part.is_first, inputs=inputs))

    def _widening(self, root: str) -> LinearWeight:
        """Load the feed-forward block's first projection, with its gate where it has one."""
        parts = [
            self._parts(root + name, self._config.mlp_bias, outputs=self._part.inner)
            for name in self._names.mlp_in
        ]
        if self._config.gated:
            gate, up = parts
            return self._precision.pack_gated(gate, up)
        return self._pack(*parts[0])

    def _query_key_value(self, root: str) -> LinearWeight:
        """Load the three projections as one: all queries' rows, then keys', then values'."""
        parts = [
            self._parts(root + name, self._config.qkv_bias, outputs=outputs)
            for name, outputs in self._query_key_value_ranges()
        ]
        weight = torch.cat([weight for weight, _ in parts])
        biases = [bias for _, bias in parts if bias is not None]
        bias = torch.cat(biases) if biases else None
        if self._names.interleaved:
            weight = self._deinterleaved(weight)
            bias = None if bias is None else self._deinterleaved(bias)
        return self._pack(weight, bias)

    def _query_key_value_ranges(self) -> list[tuple[str, slice]]:
        """Return which outputs of which tensors, in the order of the packed projection."""
        names, part, size = self._names.query_key_value, self._part, self._config.head_size
        queries, keys = channels(part.heads, size), channels(part.kv_heads, size)
        if len(names) == 3:
            return list(zip(names, (queries, keys, keys), strict=True))
        if self._names.interleaved:
            return [(names[0], channels(part.heads, 3 * size))]
        # Fused families have as many heads of keys and values as of queries.
        all_heads = self._config.n_heads * part.ranks * size
        starts = [queries.start + third * all_heads for third in range(3)]
        return [(names[0], slice(start, start + queries.stop - queries.start)) for start in starts]

    def _deinterleaved(self, fused: Tensor) -> Tensor:
        """Reorder from query, key and value of each head to all queries, all keys, all values."""
        heads = fused.view(self._config.n_heads, 3, self._config.head_size, *fused.shape[1:])
        return heads.transpose(0, 1).flatten(0, 2)
