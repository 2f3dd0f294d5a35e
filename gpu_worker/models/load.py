"""Loads a decoder from a checked model directory.

`checkpoints/weights.py` says how a family names and lays out its tensors.  Here they are brought
into the one layout that the decoder computes with.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from nightjar import kernels
from nightjar.checkpoints import ModelConfig, ModelDirectory
from nightjar.checkpoints.disk import ReadAhead
from nightjar.checkpoints.precision_plan import PrecisionPlan
from nightjar.checkpoints.weights import TENSOR_NAMES
from nightjar.gpu_worker.models.decoder import Decoder, DecoderWeights
from nightjar.gpu_worker.models.gpu_limits import check_gpu
from nightjar.gpu_worker.models.plan_rules import WIDE_RESULTS, PlanRules, stored_plan
from nightjar.gpu_worker.models.precision import PRECISIONS, Precision, precision_of
from nightjar.gpu_worker.models.rope import RopeTable
from nightjar.gpu_worker.models.split import Part, channels
from nightjar.gpu_worker.models.weight_reader import WeightReader
from nightjar.kernels import NARROW, LayerWeights, LinearWeight, Norm, Wide

_ALL = slice(None)
_LAYERS_AHEAD = 2
"""So many layers are read from disk while one is packed; more would only take memory."""


def load_model(
    directory: ModelDirectory,
    dtype: str,
    device: str = "cpu",
    part: Part | None = None,
    plan: PrecisionPlan | None = None,
) -> Decoder:
    """Load the weights of a model directory, which has checked them against its config.

    dtype: "fp64", "fp32", "bf16" or "fp16", the storage of weights, activations and cache.  "int8"
    multiplies in bytes (see kernels.pack_linear), caches in FP16 and keeps the rest in FP32.
    "bf16" does the same in bfloat16 on a CPU with instructions for its products.  "fp8" multiplies
    numbers of 8 bits and keeps the rest, the LM head too, in bf16; a CPU emulates it, slowly.  A
    GPU computes in fp32, bf16, fp16 and fp8.
    part: what a ShardDecoder loads; nothing else is read.
    plan: what stays in FP32; by default the model's own plan.

    Raises:
        CheckpointError: The model's plan cannot be used, or the GPU has no kernels for the model's
            heads or for so many tokens.
        ValueError: An unknown dtype, or not one of the device's.
    """
    if dtype not in PRECISIONS:
        raise ValueError(f"dtype {dtype!r}: one of {', '.join(PRECISIONS)}")
    precision = precision_of(dtype, device)
    if device != "cpu":
        check_gpu(directory.config, dtype, device)
    part = part or Part.of(directory.config)
    rules = PlanRules(plan or stored_plan(directory, dtype), dtype)
    config = rules.scaled(part.config(directory.config))
    with torch.inference_mode(), ReadAhead() as ahead:
        reader = WeightReader(directory, ahead)
        loader = _Loader(config, reader, precision, device, part, rules)
        weights = loader.weights()
    _give_memory_back()
    decoder = Decoder(config, weights, precision.dtype, precision.cache, device)
    decoder.no_adapters = rules.no_adapters
    return decoder


def _give_memory_back() -> None:
    """Return memory to the system that reading and packing have freed.

    glibc would keep up to two copies of the largest weights as long as the process runs.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Loader:
    """Reads and packs the weights of one model, or of one part; norms are in FP32 at least."""

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        precision: Precision,
        device: str,
        part: Part,
        rules: PlanRules,
    ) -> None:
        """config: that of the part."""
        self._config = config
        self._names = TENSOR_NAMES[config.family]
        self._reader = reader
        self._precision = precision
        self._device = device
        self._part = part
        self._rules = rules
        # What is packed into memory of its own is read from the mapped file, without a copy before.
        self._keep = device != "cpu" or not kernels.packs_copies(precision.dtype, precision.weights)

    def weights(self) -> DecoderWeights:
        """All weights of the decoder."""
        config, names, part = self._config, self._names, self._part
        for beginning in (names.tokens, *(f"{names.layer}.{i}." for i in range(_LAYERS_AHEAD))):
            self._reader.expect(beginning)
        # Only a whole head can serve as the table. A rank keeps the table beside its part.
        one_copy = config.tied_embeddings and part.ranks == 1
        tokens = self._tensor(f"{names.tokens}.weight", keep=self._keep or not one_copy)
        positions, rope = None, None
        if config.rope is not None:
            rope = RopeTable.build(config.rope, config.context_length, self._device)
        else:
            positions = self._tensor(f"{names.positions}.weight")
        layers = tuple(self._layer(i, f"{names.layer}.{i}.") for i in range(config.n_layers))
        last_norm = self._norm(names.last_norm)
        # The scores are linear in the last norm's result: its weights take the scores' multiplier.
        for weight in (last_norm.weight, last_norm.bias):
            if weight is not None:
                weight.mul_(config.logits_multiplier)
        if config.tied_embeddings:
            head_table = tokens[part.tokens]
        else:
            head_table = self._tensor(f"{names.head}.weight", part.tokens, keep=self._keep)
        whole = self._precision.whole_head
        head = self._precision.pack(head_table, None, WIDE_RESULTS, exact=whole)
        found = kernels.tied_table(tokens, head) if one_copy else tokens
        if one_copy and found is tokens and not self._keep:
            found = tokens.clone()
        return DecoderWeights(
            tokens=found,
            positions=positions,
            rope=rope,
            layers=layers,
            last_norm=last_norm,
            head=head,
        )

    def _layer(self, number: int, root: str) -> LayerWeights:
        """Load one block; root: the beginning of its tensors' names."""
        config, names = self._config, self._names
        later = number + _LAYERS_AHEAD
        self._reader.expect(f"{names.layer}.{later}." if later < config.n_layers else names.head)
        query_norm, key_norm, attention_post_norm, mlp_post_norm = None, None, None, None
        if config.qk_norm:
            query_norm, key_norm = (self._norm(root + name) for name in names.qk_norms)
        if config.post_norms:
            attention_post_norm, mlp_post_norm = (
                self._norm(root + name) for name in names.post_norms
            )
        return LayerWeights(
            attention_norm=self._norm(root + names.attention_norm),
            qkv=self._query_key_value(number, root),
            query_norm=query_norm,
            key_norm=key_norm,
            attention_out=self._joining(
                root + names.attention_out,
                config.attention_out_bias,
                channels(self._part.heads, config.head_size),
                factor=self._rules.attention_out_factor(number),
            ),
            attention_post_norm=attention_post_norm,
            mlp_norm=self._norm(root + names.mlp_norm),
            up=self._widening(number, root),
            down=self._joining(
                root + names.mlp_out,
                config.mlp_bias,
                self._part.inner,
                exact=self._rules.is_exact(number),
            ),
            mlp_post_norm=mlp_post_norm,
        )

    def _tensor(self, name: str, *ranges: slice, factor: float = 1.0, keep: bool = True) -> Tensor:
        """Read a tensor, or a part of it, times a factor; it is rounded after that.

        keep: as WeightReader.tensor says.
        """
        dtype = self._precision.dtype
        if factor == 1.0:
            return self._reader.tensor(name, dtype, self._device, *ranges, keep=keep)
        found = self._reader.tensor(name, torch.float32, self._device, *ranges)
        return found.mul_(factor).to(dtype)

    def _norm(self, name: str) -> Norm:
        """Load a norm, with a bias where the config's norms have one."""
        dtype = torch.promote_types(self._precision.dtype, torch.float32)
        weight = self._reader.tensor(f"{name}.weight", dtype, self._device)
        bias = None
        if self._config.norm == "layer_norm":
            bias = self._reader.tensor(f"{name}.bias", dtype, self._device)
        return Norm(weight, bias, self._config.norm_epsilon)

    def _parts(
        self,
        name: str,
        bias: bool,
        *,
        outputs: slice = _ALL,
        inputs: slice = _ALL,
        factor: float = 1.0,
        wide: Wide = NARROW,
    ) -> tuple[Tensor, Tensor | None]:
        """Read a projection's weight [out, in], to be packed, and bias [out], both in the ranges.

        factor: of both, a power of two.  wide: of the product.
        """
        keep, name_of_weight = self._keep, f"{name}.weight"
        if self._names.input_major:
            weight = self._tensor(name_of_weight, inputs, outputs, factor=factor, keep=keep).t()
        else:
            weight = self._tensor(name_of_weight, outputs, inputs, factor=factor, keep=keep)
        return weight, self._bias(name, wide, outputs, factor) if bias else None

    def _bias(
        self, name: str, wide: Wide, outputs: slice = _ALL, factor: float = 1.0
    ) -> Tensor | None:
        """Read a bias; it stays in FP32 where results are wide and FP16 cannot hold it."""
        dtype = self._precision.dtype
        if dtype != torch.float16:
            return self._tensor(f"{name}.bias", outputs, factor=factor)
        bias = self._reader.tensor(f"{name}.bias", torch.float32, self._device, outputs) * factor
        rounded = bias.to(dtype)
        return bias if wide.results and bool(rounded.isinf().any()) else rounded

    def _joining(
        self, name: str, bias: bool, inputs: slice, *, factor: float = 1.0, exact: bool = False
    ) -> LinearWeight:
        """Load a projection back to the residual stream, from the part's inputs.

        The ranks' outputs are summed, so only the first rank has the bias.  The stream is in FP32,
        and so are these results, in every precision.  factor: of the weight, a power of two.
        """
        weight, _ = self._parts(name, bias=False, inputs=inputs, factor=factor)
        own_bias = self._bias(name, WIDE_RESULTS) if bias and self._part.is_first else None
        return self._precision.pack(weight, own_bias, WIDE_RESULTS, exact=exact)

    def _widening(self, number: int, root: str) -> LinearWeight:
        """Load the feed-forward block's first projection, with its gate where it has one."""
        wide, exact = self._rules.up(number), self._rules.is_exact(number)
        parts = [
            self._parts(root + name, self._config.mlp_bias, outputs=self._part.inner, wide=wide)
            for name in self._names.mlp_in
        ]
        if self._config.gated:
            gate, up = parts
            return self._precision.pack_gated(gate, up, wide, exact=exact)
        return self._precision.pack(*parts[0], wide, exact=exact)

    def _query_key_value(self, number: int, root: str) -> LinearWeight:
        """Load the three projections as one: all queries' rows, then keys', then values'."""
        factors = self._rules.head_factors(number)
        one_tensor = self._names.interleaved
        parts = [
            self._parts(root + name, self._config.qkv_bias, outputs=outputs, factor=factor)
            for (name, outputs), factor in zip(
                self._query_key_value_ranges(), factors, strict=not one_tensor
            )
        ]
        weight = parts[0][0] if one_tensor else torch.cat([weight for weight, _ in parts])
        biases = [bias for _, bias in parts if bias is not None]
        bias = torch.cat(biases) if biases else None
        if one_tensor:
            rows = (
                torch.tensor(factors, device=weight.device)
                .repeat_interleave(weight.shape[0] // 3)
                .to(weight)
            )
            # It was read with the queries' factor.
            weight = self._deinterleaved(weight) * (rows / factors[0])[:, None]
            bias = None if bias is None else self._deinterleaved(bias) * (rows / factors[0])
        return self._precision.pack(weight, bias, self._rules.query_key_value(number))

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
