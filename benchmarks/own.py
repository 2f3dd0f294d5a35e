"""Figures of our engine alone: what they are and what they are held against stands here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from .bare_forward import decode_rate, prefill_rate
from .figures import SystemRecord, median_first_token
from .peers.protocol import Workload

BYTES_PER_WEIGHT = {"fp32": 4, "bf16": 2, "int8": 1}
KV_BUDGET_MIB = 1024
"""EngineConfig's default."""


def figures(
    records: Sequence[SystemRecord], workloads: dict[str, Workload], model: Path, threads: int
) -> dict[str, Any]:
    """By precision: what the goals of docs/performance.md ask of the engine itself."""
    return {
        record.precision: _of_record(record, workloads, model, threads)
        for record in records
        if record.system == "nightjar" and record.failed is None
    }


def _of_record(
    record: SystemRecord, workloads: dict[str, Workload], model: Path, threads: int
) -> dict[str, Any]:
    def seconds(name: str) -> float | None:
        return median(record.measured[name].seconds) if name in record.measured else None

    found: dict[str, Any] = {}
    mixed, even = seconds("mixed_lengths"), seconds("even_lengths")
    if mixed and even:
        found["mixed_over_even"] = round(even / mixed, 3)
    full, short = seconds("full_answers"), seconds("short_answers")
    if full and short:
        tokens = [sum(g.tokens for g in record.outcomes[name].generated) for name in SHORT]
        found["full_over_short_time"] = round(full / short, 3)
        found["full_over_short_tokens"] = round(tokens[1] / tokens[0], 3)
    if record.first_token:
        found["first_token"] = median_first_token(record.first_token)
    found["memory"] = memory(record, model)
    found |= bare_share(record, workloads, model, threads)
    return found


SHORT = ("short_answers", "full_answers")


def memory(record: SystemRecord, model: Path) -> dict[str, Any]:
    """Peak of the process over weights and KV budget; `start_mib` is Python and its libraries."""
    header_size = int.from_bytes((model / "model.safetensors").read_bytes()[:8], "little")
    raw = (model / "model.safetensors").read_bytes()[8 : 8 + header_size]
    stored = json.loads(raw)
    weights = sum(
        entry["data_offsets"][1] - entry["data_offsets"][0]
        for name, entry in stored.items()
        if name != "__metadata__"
    )
    weights_mib = weights / 4 * BYTES_PER_WEIGHT[record.precision] / 2**20
    budget = weights_mib + KV_BUDGET_MIB
    return {
        "peak_mib": round(record.peak_mib),
        "start_mib": round(record.about["start_mib"]),
        "weights_mib": round(weights_mib),
        "kv_budget_mib": KV_BUDGET_MIB,
        "peak_over_budget": round(record.peak_mib / budget, 3),
    }


def bare_share(
    record: SystemRecord, workloads: dict[str, Workload], model: Path, threads: int
) -> dict[str, Any]:
    """Prefill and decode as shares of what the bare forward does, measured in the same run."""
    names = ("prefill_only", "decode_from", "decode_to")
    if not set(names) <= set(record.measured):
        return {}
    prefill_s, from_s, to_s = (median(record.measured[name].seconds) for name in names)
    prompts = workloads["prefill_only"].generations
    prefill = sum(len(g.token_ids) for g in prompts) / prefill_s
    rows = workloads["decode_to"].generations
    steps = rows[0].max_tokens - workloads["decode_from"].generations[0].max_tokens
    decode = len(rows) * steps / (to_s - from_s)
    context = len(rows[0].token_ids) + rows[0].max_tokens // 2
    bare_prefill, bare_decode = bare_rates(model, record.precision, threads, len(rows), context)
    return {
        "prefill_tokens_per_s": round(prefill, 1),
        "decode_tokens_per_s": round(decode, 1),
        "bare_prefill_tokens_per_s": round(bare_prefill, 1),
        "bare_decode_tokens_per_s": round(bare_decode, 1),
        "prefill_share": round(prefill / bare_prefill, 3),
        "decode_share": round(decode / bare_decode, 3),
    }


@cache
def bare_rates(
    model: Path, precision: str, threads: int, rows: int, context: int
) -> tuple[float, float]:
    """Prefill and decode of the bare forward, tokens/s, measured when first asked for."""
    return (
        prefill_rate(model, precision, threads),
        decode_rate(model, precision, threads, rows, context),
    )
