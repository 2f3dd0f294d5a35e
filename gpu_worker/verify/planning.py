"""Derives a precision plan from the largest numbers that a model gives on plain text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nightjar.checkpoints.precision_plan import MOST_SHIFT, PLAIN, LayerPlan, PrecisionPlan
from nightjar.gpu_worker.verify.peaks import FP16_MAX, Peak

MARGIN = 8.0
"""Other texts than the sample may give numbers so many times as large."""
INT8_RANGE = FP16_MAX * 256
"""The largest number between a feed-forward block's products in int8."""


def plan_of(peaks: Sequence[Peak], model: str) -> PrecisionPlan:
    """Return what FP16 and int8 cannot hold with a margin; model: its plain fingerprint."""
    layers: dict[int, dict[str, float]] = {}
    for peak in peaks:
        layers.setdefault(peak.layer, {})[peak.product] = peak.largest
    planned = {number: _layer(largest) for number, largest in sorted(layers.items())}
    return PrecisionPlan(
        model=model,
        fp16={number: layer for number, layer in planned.items() if layer != PLAIN},
        int8=tuple(
            number
            for number, largest in sorted(layers.items())
            if not MARGIN * largest.get("up", 0.0) <= INT8_RANGE
        ),
    )


def _layer(largest: dict[str, float]) -> LayerPlan:
    def shift(name: str) -> int:
        value = largest.get(name, 0.0)
        if not math.isfinite(value) or MARGIN * value <= FP16_MAX:
            return 0  # what FP32 cannot hold, no plan can
        return min(MOST_SHIFT, math.ceil(math.log2(MARGIN * value / FP16_MAX)))

    def is_beyond(name: str) -> bool:
        return not MARGIN * largest.get(name, 0.0) <= FP16_MAX

    return LayerPlan(
        attention_input=is_beyond("attention-input"),
        mlp_input=is_beyond("mlp-input"),
        up=is_beyond("up"),
        query=shift("query"),
        key=shift("key"),
        value=shift("value"),
    )
