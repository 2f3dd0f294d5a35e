"""Which figures there are, what they are held against, and how long each may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import causes, engine_figures, kernel_figures, launches
from .lab import Lab


@dataclass(frozen=True)
class Target:
    """One line of the table: `least` and `aim` of a point, None where nothing is asked.

    share: the value is written in percent.  lower: less is better.
    """

    point: str
    title: str
    least: float | None = None
    aim: float | None = None
    unit: str = ""
    share: bool = False
    lower: bool = False

    def met(self, value: float) -> str:
        """How a value stands: "aim", "least", "below"; "" where nothing is asked."""
        for name, bound in (("aim", self.aim), ("least", self.least)):
            if bound is not None and (value <= bound if self.lower else value >= bound):
                return name
        return "" if self.least is None else "below"

    def write(self, value: float | None) -> str:
        """A value as the table has it."""
        if value is None:
            return ""
        return f"{100 * value:.1f}%" if self.share else f"{value:.3g}{self.unit}"


@dataclass(frozen=True)
class Figure:
    """What is measured on its own: one function, its limit in seconds, and its lines."""

    name: str
    budget_s: float
    measure: Callable[[Lab], dict[str, Any]]
    targets: tuple[Target, ...]


def _static_cache(lab: Lab) -> dict[str, Any]:
    from .peer_figures import over_static_cache  # noqa: PLC0415 (transformers takes seconds)

    return over_static_cache(lab)


def _continuous_batching(lab: Lab) -> dict[str, Any]:
    from .peer_figures import over_continuous_batching  # noqa: PLC0415

    return over_continuous_batching(lab)


def _decode(batch: int, least: float, aim: float) -> Figure:
    title = f"decode step of {batch}, share of the HBM floor"
    target = Target(f"decode_share_{batch}", title, least, aim, share=True)
    return Figure(f"decode_{batch}", 60, engine_figures.decode_share(batch), (target,))


def _attention(group: int, least: float, aim: float) -> Figure:
    point = f"attention_share_{group}"
    title = f"decode attention, share of a copy, {group} query heads a key head"
    target = Target(point, title, least, aim, share=True)
    name = f"decode_attention_{group}"
    return Figure(name, 30, kernel_figures.decode_attention(group, point), (target,))


FIGURES = (
    Figure(
        "machine",
        60,
        kernel_figures.machine_speed,
        (
            Target("copy_tb_s", "copy on the device, read and written", unit=" TB/s"),
            Target("read_tb_s", "reading on the device", unit=" TB/s"),
            Target("product_tflop_s", "product of square matrices, 16 bits", unit=" TFLOP/s"),
        ),
    ),
    _attention(1, 0.80, 0.92),
    _attention(4, 0.75, 0.88),
    _attention(8, 0.70, 0.85),
    _decode(1, 0.55, 0.75),
    _decode(8, 0.60, 0.75),
    Figure(
        "step_growth",
        60,
        engine_figures.step_growth,
        (Target("step_1_to_8", "step of 8 over step of 1", 1.35, 1.26, "x", lower=True),),
    ),
    Figure(
        "launch_overhead",
        60,
        launches.launch_overhead,
        (
            Target(
                "launch_overhead",
                "decode step of 8, launch overhead of the host",
                0.10,
                0.03,
                share=True,
                lower=True,
            ),
        ),
    ),
    Figure(
        "kernel_gaps",
        40,
        launches.kernel_gaps,
        (Target("kernel_gaps", "decode step of 8, time without a kernel", share=True),),
    ),
    _decode(64, 0.70, 0.85),
    _decode(256, 0.70, 0.85),
    Figure(
        "prefill",
        40,
        engine_figures.prefill,
        (Target("prefill_tflop_s", "prefill, 8k tokens in flight", 400, 550, " TFLOP/s"),),
    ),
    Figure(
        "ranking",
        40,
        engine_figures.ranking,
        (Target("ranking_sharing", "ranking, against no sharing", 6, 9, "x"),),
    ),
    Figure(
        "mixed_lengths",
        40,
        engine_figures.mixed_lengths,
        (
            Target("mixed_over_singles", "mixed batch of 8 against 8 singles", 5, 7, "x"),
            Target("mixed_over_even", "the same, over an even batch", 1.1, 1.03, "x", lower=True),
        ),
    ),
    Figure(
        "formats",
        60,
        engine_figures.half_over_single,
        (Target("half_over_single", "FP16 over FP32", 3, 4, "x"),),
    ),
    Figure(
        "kv_transfer",
        30,
        kernel_figures.kv_transfer,
        (
            Target("kv_pack_gb_s", "cache blocks to pinned memory", unit=" GB/s"),
            Target("kv_unpack_gb_s", "cache blocks from pinned memory", unit=" GB/s"),
        ),
    ),
    Figure(
        "kv_cache",
        80,  # 14 GB are pinned, which a virtual machine's host may have to find first
        engine_figures.kv_cache,
        (
            Target(
                "kv_hit",
                "KV in pinned memory, hit: time to first token",
                -0.30,
                -0.50,
                share=True,
                lower=True,
            ),
            Target("kv_miss", "the same, miss", 0.02, 0.005, share=True, lower=True),
        ),
    ),
    # Last: a figure that runs out of time takes its process along.
    Figure(
        "transformers_static",
        120,
        _static_cache,
        (Target("over_static_cache", "over transformers, static cache compiled", 3, 6, "x"),),
    ),
    Figure(
        "transformers_continuous",
        90,
        _continuous_batching,
        (Target("over_continuous_batching", "over transformers, continuous batching", 3, 6, "x"),),
    ),
)

BY_NAME = {figure.name: figure for figure in FIGURES}
CAUSES = {
    name: Figure(name, 80, causes.decode_steps(variant), ())
    for name, variant in causes.VARIANTS.items()
}
"""What is measured to find a cause: no figures of the table."""
TARGETS = {target.point: target for figure in FIGURES for target in figure.targets}
