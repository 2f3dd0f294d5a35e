"""The bound that the engine is held against: a model's products and attention, and nothing else.

It has the engine's packed products, and the LM head at the rows that need it.  Attention reads keys
that lie one after another.  The engine's kernel computes it where the products are compiled too,
else torch does: two sets of threads would keep each other from the cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models import Decoder, load_model
from nightjar.kernels import (
    Chunk,
    ChunkLayout,
    LayerWeights,
    PagedLayout,
    decode_attention,
    linear,
    prefill_attention,
)
from nightjar.kernels.native.attention import serves
from nightjar.kernels.native.products import PanelWeight

PREFILL_ROWS = 512
PREFILL_LENGTH = 128
"""Tokens of each of the prefill's sequences."""

REPEATS = 7
BLOCK_SIZE = 32

Attend = Callable[[int, Tensor], Tensor]
"""Attention of a layer: of a step's queries, keys and values, [T, (Hq + 2 Hkv) * D] to
[T, Hq * D]."""


def prefill_rate(model_directory: Path, dtype: str, threads: int) -> float:
    """Prompt tokens/s: PREFILL_ROWS packed rows a step, the best of REPEATS steps.

    Past the last attention only each sequence's last row is computed, as in the engine.
    """
    model = _model(model_directory, dtype)
    batch = PREFILL_ROWS // PREFILL_LENGTH
    last_rows = torch.arange(1, batch + 1) * PREFILL_LENGTH - 1
    attend = (_prefill if _compiled(model) else _prefill_by_torch)(model, batch)
    return PREFILL_ROWS / _best_s(model, PREFILL_ROWS, attend, last_rows, threads)


def decode_rate(model_directory: Path, dtype: str, threads: int, batch: int, context: int) -> float:
    """Generated tokens/s: one row for each of `batch` sequences that attend to `context` keys."""
    model = _model(model_directory, dtype)
    attend = (_decode if _compiled(model) else _decode_by_torch)(model, batch, context)
    return batch / _best_s(model, batch, attend, torch.arange(batch), threads)


def _compiled(model: Decoder) -> bool:
    """Whether products and attention of this model are the compiled kernels'."""
    head = torch.empty(1, model.config.head_size, dtype=model.cache_dtype)
    return isinstance(model.weights.head, PanelWeight) and serves(head, head)


def _prefill(model: Decoder, batch: int) -> Attend:
    cached, tables = _cache(model, batch, PREFILL_LENGTH)
    layout = ChunkLayout.build([Chunk(table, 0, PREFILL_LENGTH) for table in tables], BLOCK_SIZE)

    def attend(layer: int, qkv: Tensor) -> Tensor:
        q, scale = _split(model, qkv)[0], model.config.attention_scales[layer]
        keys, values = cached[layer]
        return prefill_attention(q, keys, values, layout, scale).flatten(1)

    return attend


def _prefill_by_torch(model: Decoder, batch: int) -> Attend:
    def attend(_: int, qkv: Tensor) -> Tensor:
        q, k, v = (_by_head(part, batch) for part in _split(model, qkv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(PREFILL_ROWS, -1)

    return attend


def _decode(model: Decoder, batch: int, context: int) -> Attend:
    cached, tables = _cache(model, batch, context)
    layout = PagedLayout.build(tables, [context] * batch, BLOCK_SIZE)

    def attend(layer: int, qkv: Tensor) -> Tensor:
        q, scale = _split(model, qkv)[0], model.config.attention_scales[layer]
        keys, values = cached[layer]
        return decode_attention(q, keys, values, layout, scale).flatten(1)

    return attend


def _decode_by_torch(model: Decoder, batch: int, context: int) -> Attend:
    config = model.config
    shape = (config.n_layers, 2, batch, config.n_kv_heads, context, config.head_size)
    cached = _normal(model.dtype, shape)

    def attend(layer: int, qkv: Tensor) -> Tensor:
        q = _by_head(_split(model, qkv)[0], batch)
        keys, values = cached[layer]
        out = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        return out.reshape(batch, -1)

    return attend


def _cache(model: Decoder, batch: int, context: int) -> tuple[Tensor, list[list[int]]]:
    """Keys and values [layers, 2, blocks, Hkv, S, D], and each sequence's blocks in turn."""
    each, config = -(-context // BLOCK_SIZE), model.config
    tables = [list(range(i * each, (i + 1) * each)) for i in range(batch)]
    shape = (config.n_layers, 2, batch * each, config.n_kv_heads, BLOCK_SIZE, config.head_size)
    return _normal(model.cache_dtype, shape), tables


def _normal(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Random keys and values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@lru_cache(maxsize=1)
def _model(model_directory: Path, dtype: str) -> Decoder:
    return load_model(ModelDirectory.open(model_directory), dtype)


def _split(model: Decoder, qkv: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values [T, H, D] of a layer's product."""
    config = model.config
    heads = qkv.view(qkv.shape[0], -1, config.head_size)
    return torch.split(heads, [config.n_heads, config.n_kv_heads, config.n_kv_heads], dim=1)


def _by_head(x: Tensor, batch: int) -> Tensor:
    """[batch * n, H, D] -> [batch, H, n, D]."""
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2)


def _widen(layer: LayerWeights, x: Tensor, activation: str) -> Tensor:
    """The feed-forward block's first half, gated where the family has a gate."""
    return linear(x, layer.up, activation)


@torch.inference_mode()
def _best_s(
    model: Decoder,
    rows: int,
    attend: Attend,
    output_rows: Tensor,
    threads: int,
) -> float:
    """Seconds of the fastest of several forward passes over `rows` rows."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(rows, model.config.hidden_size, generator=generator).to(model.dtype)
    layers = model.weights.layers
    heads_dtype = model.cache_dtype if _compiled(model) else model.dtype  # as the engine keeps them

    def step() -> Tensor:
        x = start
        for index, layer in enumerate(layers):
            attended = attend(index, linear(x, layer.qkv, out_dtype=heads_dtype))
            if index == len(layers) - 1:
                attended = attended[output_rows]
            linear(attended, layer.attention_out)
            # Every product reads rows of the start's size: without norms, what one layer gives
            # would grow from layer to layer past what a float holds.
            wide = _widen(layer, start[: attended.shape[0]], model.config.activation)
            linear(wide, layer.down)
        return linear(start[: output_rows.shape[0]], model.weights.head)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        step()
        return min(_seconds(step) for _ in range(REPEATS))
    finally:
        torch.set_num_threads(before)


def _seconds(step: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started
