"""Figures of our engine alone, and the bound that it is held against: the bare forward.

That is a model's products and attention, and nothing else.  It has the engine's packed products,
and the LM head at the rows that need it.  Attention reads keys that lie one after another.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.figures import SystemRecord, first_token
from benchmarks.harness import Figures, seconds_of
from benchmarks.peers.protocol import Workload
from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models import Decoder, load_model
from nightjar.kernels import (
    Chunk,
    ChunkLayout,
    PagedLayout,
    decode_attention,
    linear,
    prefill_attention,
)

BYTES_PER_WEIGHT = {"fp32": 4, "bf16": 2, "int8": 1}
KV_BUDGET_MIB = 1024
"""EngineConfig's default."""
PREFILL_ROWS = 512
PREFILL_LENGTH = 128
"""Tokens of each of the prefill's sequences."""
REPEATS = 7
BLOCK_SIZE = 32

Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Of a step's queries [T, Hq, D], a layer's keys and values, and the scale: [T, Hq, D]."""


def figures(
    records: Sequence[SystemRecord], workloads: dict[str, Workload], model: Path
) -> Figures:
    """By precision: what the goals of docs/performance.md ask of the engine itself."""
    found: Figures = {}
    for record in (one for one in records if one.ours and one.failed is None):
        took = {name: median(one.seconds) for name, one in record.measured.items()}
        own = found[record.precision] = {"memory": memory(record, model)}
        if {"mixed_lengths", "even_lengths"} <= took.keys():
            own["mixed_over_even"] = round(took["even_lengths"] / took["mixed_lengths"], 3)
        if {"full_answers", "short_answers"} <= took.keys():
            own["full_over_short_time"] = round(took["full_answers"] / took["short_answers"], 3)
        if "first_token" in record.measured:
            own["first_token"] = first_token(record.measured["first_token"])
        if {"prefill_only", "decode_from", "decode_to"} <= took.keys():
            own |= bare_share(record.precision, took, workloads, model)
    return found


def memory(record: SystemRecord, model: Path) -> Figures:
    """Peak of the process over weights and KV budget; `start_mib` is Python and its libraries."""
    headers = ModelDirectory.open(model).headers
    stored = sum(end - begin for one in headers for begin, end in one.spans().values())
    weights_mib = stored / 4 * BYTES_PER_WEIGHT[record.precision] / 2**20
    return {
        "peak_mib": round(record.peak_mib),
        "start_mib": round(record.about["start_mib"]),
        "weights_mib": round(weights_mib),
        "kv_budget_mib": KV_BUDGET_MIB,
        "peak_over_budget": round(record.peak_mib / (weights_mib + KV_BUDGET_MIB), 3),
    }


def bare_share(
    precision: str, seconds: dict[str, float], workloads: dict[str, Workload], model: Path
) -> Figures:
    """Prefill and decode as shares of what the bare forward does, measured in the same run."""
    tokens = sum(len(one.token_ids) for one in workloads["prefill_only"].generations)
    rows = workloads["decode_to"].generations
    steps = rows[0].max_tokens - workloads["decode_from"].generations[0].max_tokens
    context = len(rows[0].token_ids) + rows[0].max_tokens // 2
    rates = {
        "prefill": tokens / seconds["prefill_only"],
        "decode": len(rows) * steps / (seconds["decode_to"] - seconds["decode_from"]),
    }
    bare = {
        "prefill": prefill_rate(model, precision),
        "decode": decode_rate(model, precision, len(rows), context),
    }
    return {
        **{f"{name}_tokens_per_s": round(rate, 1) for name, rate in rates.items()},
        **{f"bare_{name}_tokens_per_s": round(rate, 1) for name, rate in bare.items()},
        **{f"{name}_share": round(rate / bare[name], 3) for name, rate in rates.items()},
    }


@cache  # the result is written again and again
def prefill_rate(model_directory: Path, dtype: str) -> float:
    """Prompt tokens/s: PREFILL_ROWS packed rows a step, the best of REPEATS steps.

    Past the last attention only each sequence's last row is computed, as in the engine.
    """
    batch = PREFILL_ROWS // PREFILL_LENGTH
    chunks = [Chunk(table, 0, PREFILL_LENGTH) for table in _tables(batch, PREFILL_LENGTH)]
    layout = ChunkLayout.build(chunks, BLOCK_SIZE)

    def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        return prefill_attention(q, keys, values, layout, scale)

    last_rows = torch.arange(1, batch + 1) * PREFILL_LENGTH - 1
    model = _model(model_directory, dtype)
    return PREFILL_ROWS / _best_s(model, PREFILL_ROWS, attend, PREFILL_LENGTH, last_rows)


@cache
def decode_rate(model_directory: Path, dtype: str, batch: int, context: int) -> float:
    """Generated tokens/s: one row for each of `batch` sequences that attend to `context` keys."""
    layout = PagedLayout.build(_tables(batch, context), [context] * batch, BLOCK_SIZE)

    def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        return decode_attention(q, keys, values, layout, scale)

    model = _model(model_directory, dtype)
    return batch / _best_s(model, batch, attend, context, torch.arange(batch))


def _tables(batch: int, context: int) -> list[list[int]]:
    """Each sequence's blocks in turn."""
    each = -(-context // BLOCK_SIZE)
    return [list(range(i * each, (i + 1) * each)) for i in range(batch)]


@lru_cache(maxsize=1)
def _model(model_directory: Path, dtype: str) -> Decoder:
    return load_model(ModelDirectory.open(model_directory), dtype)


@torch.inference_mode()
def _best_s(
    model: Decoder, rows: int, attention: Attention, context: int, output_rows: Tensor
) -> float:
    """Seconds of the fastest of several forward passes over `rows` rows.

    context: keys and values of each sequence; output_rows: the last row of each.
    """
    config, layers = model.config, model.weights.layers
    blocks = len(output_rows) * -(-context // BLOCK_SIZE)
    shape = (config.n_layers, 2, blocks, config.n_kv_heads, BLOCK_SIZE, config.head_size)
    seeded = torch.Generator().manual_seed(0)
    cached = torch.randn(shape, generator=seeded).to(model.cache_dtype)
    start = torch.randn(rows, config.hidden_size, generator=seeded).to(model.dtype)

    def step() -> None:
        for index, layer in enumerate(layers):
            # Heads are kept no wider than the cache keeps them, as in the engine.
            qkv = linear(start, layer.qkv, out_dtype=model.cache_dtype)
            q = qkv.view(rows, -1, config.head_size)[:, : config.n_heads]
            keys, values = cached[index]
            attended = attention(q, keys, values, config.attention_scales[index]).flatten(1)
            if index == len(layers) - 1:
                attended = attended[output_rows]
            linear(attended, layer.attention_out)
            # Every product reads rows of the start's size: without norms, what one layer gives
            # would grow from layer to layer past what a float holds.
            wide = linear(start[: attended.shape[0]], layer.up, config.activation)
            linear(wide, layer.down)
        linear(start[: output_rows.shape[0]], model.weights.head)

    step()
    return min(seconds_of(step) for _ in range(REPEATS))
