"""Which figures there are, what they are held against, and how long each may take."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from benchmarks.harness import data_beside

from . import causes, engine_figures, kernel_figures, launches, mixed_steps
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


def over_transformers(name: str, lab: Lab, **settings: bool | None) -> Points:
    """A figure whose module takes seconds to import."""
    found: Points = getattr(import_module("benchmarks.gpu.peer_figures"), name)(lab, **settings)
    return found


_BATCHING = partial(over_transformers, "over_continuous_batching", graphs=None)
FIGURES = {
    "machine": Figure(60, kernel_figures.machine_speed),
    "decode_attention_1": Figure(30, kernel_figures.decode_attention(1)),
    "decode_attention_4": Figure(30, kernel_figures.decode_attention(4)),
    "decode_attention_8": Figure(30, kernel_figures.decode_attention(8)),
    "decode_attention_fp8_1": Figure(30, kernel_figures.decode_attention(1, fp8=True)),
    "decode_attention_fp8_4": Figure(30, kernel_figures.decode_attention(4, fp8=True)),
    "products": Figure(20, kernel_figures.few_rows(fp8=False)),
    "products_fp8": Figure(20, kernel_figures.few_rows(fp8=True)),
    "many_rows_fp8": Figure(20, kernel_figures.many_rows_in_fp8),
    "decode_1": Figure(60, engine_figures.decode_share(1)),
    "decode_8": Figure(60, engine_figures.decode_share(8)),
    "step_growth": Figure(60, engine_figures.step_growth),
    "launch_overhead": Figure(60, launches.launch_overhead),
    "decode_64": Figure(60, engine_figures.decode_share(64)),
    "decode_256": Figure(60, engine_figures.decode_share(256)),
    "fp8_cache": Figure(60, engine_figures.fp8_cache),
    "mixed_steps": Figure(40, mixed_steps.mixed_steps),
    "prefill": Figure(40, engine_figures.prefill),
    "ranking": Figure(40, engine_figures.ranking),
    "mixed_lengths": Figure(40, engine_figures.mixed_lengths),
    "formats": Figure(60, engine_figures.half_over_single),
    # 12 GB are pinned, which a virtual machine's host may have to find first.
    "kv_cache": Figure(80, engine_figures.kv_cache),
    # Last: a figure that runs out of time takes its process along.
    "transformers_static": Figure(120, partial(over_transformers, "over_static_cache")),
    "transformers_continuous": Figure(60, _BATCHING),
    "transformers_graphs": Figure(60, partial(_BATCHING, graphs=True)),
}
CAUSES = {name: Figure(80, causes.decode_steps(name)) for name in causes.VARIANTS}
"""What is measured to find a cause: no figures of the table."""

TARGETS = tuple(
    Target(figure, point, **target)
    for figure, points in data_beside(__file__, "targets.toml").items()
    for point, target in points.items()
)
