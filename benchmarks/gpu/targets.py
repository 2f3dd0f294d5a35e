"""Which figures there are, what they are held against, and how long each may take."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from . import causes, engine_figures, kernel_figures, launches
from .lab import Lab, Points


@dataclass(frozen=True)
class Target:
    """One line of the table: `least` and `aim` of a point, None where nothing is asked.

    unit: "%" for a share.  lower: less is better.
    """

    figure: str
    point: str
    title: str
    unit: str
    least: float | None = None
    aim: float | None = None
    lower: bool = False

    def met(self, value: float) -> str:
        """How a value stands: "aim", "least", "below"; "" where nothing is asked."""
        for name, bound in (("aim", self.aim), ("least", self.least)):
            if bound is not None and (value <= bound if self.lower else value >= bound):
                return name
        return "" if self.least is None else "below"

    def write(self, value: float) -> str:
        """A value as the table has it."""
        return f"{100 * value:.1f}%" if self.unit == "%" else f"{value:.3g}{self.unit}"


@dataclass(frozen=True)
class Figure:
    """What is measured on its own: one function, and its limit in seconds."""

    budget_s: float
    measure: Callable[[Lab], Points]


def _of_transformers(name: str, lab: Lab) -> Points:
    """A figure whose module takes seconds to import."""
    found: Points = getattr(import_module("benchmarks.gpu.peer_figures"), name)(lab)
    return found


FIGURES = {
    "machine": Figure(60, kernel_figures.machine_speed),
    "decode_attention_1": Figure(30, kernel_figures.decode_attention(1)),
    "decode_attention_4": Figure(30, kernel_figures.decode_attention(4)),
    "decode_attention_8": Figure(30, kernel_figures.decode_attention(8)),
    "decode_1": Figure(60, engine_figures.decode_share(1)),
    "decode_8": Figure(60, engine_figures.decode_share(8)),
    "step_growth": Figure(60, engine_figures.step_growth),
    "launch_overhead": Figure(60, launches.launch_overhead),
    "decode_64": Figure(60, engine_figures.decode_share(64)),
    "decode_256": Figure(60, engine_figures.decode_share(256)),
    "prefill": Figure(40, engine_figures.prefill),
    "ranking": Figure(40, engine_figures.ranking),
    "mixed_lengths": Figure(40, engine_figures.mixed_lengths),
    "formats": Figure(60, engine_figures.half_over_single),
    # 12 GB are pinned, which a virtual machine's host may have to find first.
    "kv_cache": Figure(80, engine_figures.kv_cache),
    # Last: a figure that runs out of time takes its process along.
    "transformers_static": Figure(120, partial(_of_transformers, "over_static_cache")),
    "transformers_continuous": Figure(90, partial(_of_transformers, "over_continuous_batching")),
}
CAUSES = {name: Figure(80, causes.decode_steps(name)) for name in causes.VARIANTS}
"""What is measured to find a cause: no figures of the table."""

_SHARE = "decode attention, share of a copy, {} query heads a key head"
_FLOOR = "decode step of {}, share of the HBM floor"
_HIT = "KV in pinned memory, hit: time to first token"
_HOST = "decode step of 8, launch overhead of the host"
_EVEN = "the same, over an even batch"
_STATIC = "over transformers, static cache compiled"
_BATCHING = "over transformers, continuous batching"
TARGETS = (
    Target("machine", "copy_tb_s", "copy on the device, read and written", " TB/s"),
    Target("machine", "read_tb_s", "reading on the device", " TB/s"),
    Target("machine", "product_tflop_s", "product of square matrices, 16 bits", " TFLOP/s"),
    Target("decode_attention_1", "attention_share_1", _SHARE.format(1), "%", 0.80, 0.92),
    Target("decode_attention_4", "attention_share_4", _SHARE.format(4), "%", 0.75, 0.88),
    Target("decode_attention_8", "attention_share_8", _SHARE.format(8), "%", 0.70, 0.85),
    Target("decode_1", "decode_share_1", _FLOOR.format(1), "%", 0.55, 0.75),
    Target("decode_8", "decode_share_8", _FLOOR.format(8), "%", 0.60, 0.75),
    Target("step_growth", "step_1_to_8", "step of 8 over step of 1", "x", 1.35, 1.26, True),
    Target("launch_overhead", "launch_overhead", _HOST, "%", 0.10, 0.03, True),
    Target("decode_64", "decode_share_64", _FLOOR.format(64), "%", 0.70, 0.85),
    Target("decode_256", "decode_share_256", _FLOOR.format(256), "%", 0.70, 0.85),
    Target("prefill", "prefill_tflop_s", "prefill, 8k tokens in flight", " TFLOP/s", 400, 550),
    Target("ranking", "ranking_sharing", "ranking, against no sharing", "x", 6, 9),
    Target("mixed_lengths", "mixed_over_singles", "mixed batch of 8 against 8 singles", "x", 5, 7),
    Target("mixed_lengths", "mixed_over_even", _EVEN, "x", 1.1, 1.03, True),
    Target("formats", "half_over_single", "FP16 over FP32", "x", 3, 4),
    Target("kv_cache", "kv_hit", _HIT, "%", -0.30, -0.50, True),
    Target("kv_cache", "kv_miss", "the same, miss", "%", 0.02, 0.005, True),
    Target("transformers_static", "over_static_cache", _STATIC, "x", 3, 6),
    Target("transformers_continuous", "over_continuous_batching", _BATCHING, "x", 3, 6),
)
