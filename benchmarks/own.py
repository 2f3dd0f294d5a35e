"""Figures of our engine alone: what they are and what they are held against stands here."""

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
        if record.ours and record.failed is None
    }


def _of_record(
    record: SystemRecord, workloads: dict[str, Workload], model: Path, threads: int
) -> dict[str, Any]:
    seconds = {name: median(one.seconds) for name, one in record.measured.items()}
    found: dict[str, Any] = {"memory": memory(record, model)}
    if {"mixed_lengths", "even_lengths"} <= seconds.keys():
        found["mixed_over_even"] = round(seconds["even_lengths"] / seconds["mixed_lengths"], 3)
    if {"full_answers", "short_answers"} <= seconds.keys():
        found["full_over_short_time"] = round(seconds["full_answers"] / seconds["short_answers"], 3)
    if record.first_token:
        found["first_token"] = median_first_token(record.first_token)
    if {"prefill_only", "decode_from", "decode_to"} <= seconds.keys():
        found |= bare_share(record.precision, seconds, workloads, model, threads)
    return found


def memory(record: SystemRecord, model: Path) -> dict[str, Any]:
    """Peak of the process over weights and KV budget; `start_mib` is Python and its libraries."""
    raw = (model / "model.safetensors").read_bytes()
    tensors = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    tensors.pop("__metadata__", None)
    stored = max(entry["data_offsets"][1] for entry in tensors.values())
    weights_mib = stored / 4 * BYTES_PER_WEIGHT[record.precision] / 2**20
    return {
        "peak_mib": round(record.peak_mib),
        "start_mib": round(record.about["start_mib"]),
        "weights_mib": round(weights_mib),
        "kv_budget_mib": KV_BUDGET_MIB,
        "peak_over_budget": round(record.peak_mib / (weights_mib + KV_BUDGET_MIB), 3),
    }


def bare_share(
    precision: str,
    seconds: dict[str, float],
    workloads: dict[str, Workload],
    model: Path,
    threads: int,
) -> dict[str, Any]:
    """Prefill and decode as shares of what the bare forward does, measured in the same run."""
    prompts = workloads["prefill_only"].generations
    prefill = sum(len(g.token_ids) for g in prompts) / seconds["prefill_only"]
    rows = workloads["decode_to"].generations
    steps = rows[0].max_tokens - workloads["decode_from"].generations[0].max_tokens
    decode = len(rows) * steps / (seconds["decode_to"] - seconds["decode_from"])
    context = len(rows[0].token_ids) + rows[0].max_tokens // 2
    bare_prefill, bare_decode = bare_rates(model, precision, threads, len(rows), context)
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
