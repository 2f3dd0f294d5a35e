"""From a checked model directory to a decoder.

What a family calls its tensors and how it lays them out stands in `checkpoints/weights.py`; here
they are brought into the one layout that the decoder computes with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nightjar.checkpoints import CheckpointError, ModelConfig, ModelDirectory
from nightjar.checkpoints.weights import TENSOR_NAMES
from nightjar.gpu_worker.models.decoder import (
    Decoder,
    DecoderWeights,
    LayerWeights,
)
from nightjar.gpu_worker.models.precision import GPU_PRECISIONS, PRECISIONS, Precision
from nightjar.gpu_worker.models.rope import RopeTable
from nightjar.gpu_worker.models.weight_reader import WeightReader
from nightjar.kernels import GatedWeight, LinearWeight, Norm
from nightjar.kernels.cuda.qkv_post import HEAD_SIZES


def load_model(directory: ModelDirectory, dtype: str, device: str = "cpu") -> Decoder:
    """Load the weights of a model directory, which has checked that they are those of its config.

    dtype: "fp64", "fp32", "bf16" or "fp16", the storage of weights, activations and cache; or
    "int8", which multiplies in bytes (see kernels.pack_linear), caches in FP16 and keeps the rest
    in FP32.  A GPU computes in fp32, bf16 and fp16.

    Raises:
        CheckpointError: The GPU has no kernels for the model's heads.
        ValueError: An unknown dtype, or not one of the device's.
    """
    if dtype not in PRECISIONS:
        raise ValueError(f"dtype {dtype!r}: one of {', '.join(PRECISIONS)}")
    precision = PRECISIONS[dtype]
    if device != "cpu":
        _check_gpu(directory.config, dtype, device)
    with torch.inference_mode(), WeightReader(directory) as reader:
        weights = _Loader(directory.config, reader, precision, device).weights()
    return Decoder(directory.config, weights, precision.dtype, precision.cache, device)


def _check_gpu(config: ModelConfig, dtype: str, device: str) -> None:
    """Refuse what the CUDA kernels do not compute, before anything is read."""
    if dtype not in GPU_PRECISIONS:
        known = ", ".join(GPU_PRECISIONS)
        raise ValueError(f"dtype {dtype!r} is not computed on {device}: use one of {known}")
    if config.head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        raise CheckpointError(
            f"the model's heads have {config.head_size} channels, and on {device} there are "
            f"kernels for {sizes}: compute it on the CPU"
        )


class _Loader:
    """Reads and packs the weights of one model; norms are in FP32 at least."""

    def __init__(
        self, config: ModelConfig, reader: WeightReader, precision: Precision, device: str
    ) -> None:
        self._config = config
        self._names = TENSOR_NAMES[config.family]
        self._reader = reader
        self._precision = precision
        self._device = device

    def weights(self) -> DecoderWeights:
        """All weights of the decoder."""
        config, names = self._config, self._names
        tokens = self._tensor(f"{names.tokens}.weight")
        positions, rope = None, None
        if config.rope is None:
            positions = self._tensor(f"{names.positions}.weight")
        else:
            rope = RopeTable.build(config.rope, config.context_length, self._device)
        layers = tuple(self._layer(f"{names.layer}.{i}.") for i in range(config.n_layers))
        last_norm = self._norm(names.last_norm)
        # The scores are linear in what the last norm gives: its weights take their multiplier.
        for part in (last_norm.weight, last_norm.bias):
            if part is not None:
                part.mul_(config.logits_multiplier)
        head = tokens if config.tied_embeddings else self._tensor(f"{names.head}.weight")
        return DecoderWeights(
            tokens=tokens,
            positions=positions,
            rope=rope,
            layers=layers,
            last_norm=last_norm,
            head=self._pack(head, None),
        )

    def _layer(self, root: str) -> LayerWeights:
        """One block; root: what its tensors' names begin with."""
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
            attention_out=self._projection(root + names.attention_out, config.attention_out_bias),
            attention_post_norm=attention_post_norm,
            mlp_norm=self._norm(root + names.mlp_norm),
            up=self._widening(root),
            down=self._projection(root + names.mlp_out, config.mlp_bias),
            mlp_post_norm=mlp_post_norm,
        )

    def _tensor(self, name: str) -> Tensor:
        return self._reader.tensor(name, self._precision.dtype, self._device)

    def _pack(self, weight: Tensor, bias: Tensor | None) -> LinearWeight:
        return self._precision.pack(weight, bias)

    def _norm(self, name: str) -> Norm:
        """A norm, with a bias where the config's norms have one."""
        dtype = torch.promote_types(self._precision.dtype, torch.float32)
        weight = self._reader.tensor(f"{name}.weight", dtype, self._device)
        bias = None
        if self._config.norm == "layer_norm":
            bias = self._reader.tensor(f"{name}.bias", dtype, self._device)
        return Norm(weight, bias, self._config.norm_epsilon)

    def _parts(self, name: str, bias: bool) -> tuple[Tensor, Tensor | None]:
        """A projection's weight [out, in] and bias [out]."""
        weight = self._tensor(f"{name}.weight")
        if self._names.input_major:
            weight = weight.t()
        return weight, self._tensor(f"{name}.bias") if bias else None

    def _projection(self, name: str, bias: bool) -> LinearWeight:
        return self._pack(*self._parts(name, bias))

    def _widening(self, root: str) -> LinearWeight | GatedWeight:
        """The feed-forward block's first projection, with its gate where the family has one."""
        parts = [self._parts(root + name, self._config.mlp_bias) for name in self._names.mlp_in]
        if self._config.gated:
            gate, up = parts
            return self._precision.pack_gated(gate, up)
        return self._pack(*parts[0])

    def _query_key_value(self, root: str) -> LinearWeight:
        """The three projections as one: all queries' rows, then keys', then values'."""
        config, names = self._config, self._names
        parts = [self._parts(root + name, config.qkv_bias) for name in names.query_key_value]
        weight = torch.cat([weight for weight, _ in parts])
        biases = [bias for _, bias in parts if bias is not None]
        bias = torch.cat(biases) if biases else None
        if names.interleaved:
            weight = self._deinterleaved(weight)
            bias = None if bias is None else self._deinterleaved(bias)
        return self._pack(weight, bias)

    def _deinterleaved(self, fused: Tensor) -> Tensor:
        """From each head's query, key and value together to all queries, keys, values."""
        heads = fused.view(self._config.n_heads, 3, self._config.head_size, *fused.shape[1:])
        return heads.transpose(0, 1).flatten(0, 2)
