"""A decode step with one part of the CUDA path switched off at a time: what each part is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nightjar.kernels.device import Switches, using

from .engine_figures import timed_step
from .kernel_figures import backend
from .lab import Lab, Timing

BATCHES = (1, 8, 64)
ALL_ON = Switches()


@dataclass(frozen=True)
class Variant:
    """settings: of the engine."""

    title: str
    switches: Switches = ALL_ON
    settings: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "all_on": Variant("everything on"),
    "no_graphs": Variant("without CUDA graphs", settings={"cuda_graphs": False}),
    "no_windows": Variant("without windows", settings={"window_steps": 1}),
    "no_prefetch": Variant("without prefetch", Switches(prefetch=False)),
    "no_small_products": Variant("without small products", Switches(small_products=False)),
    "no_fused_heads": Variant("without fused heads", Switches(fused_heads=False)),
}


def decode_steps(variant: Variant) -> Callable[[Lab], dict[str, Any]]:
    """Seconds of a decode step at each batch, as the points "1", "8" and "64"."""

    def measure(lab: Lab) -> dict[str, Any]:
        steps: dict[int, Timing] = {}  # a scale may have fewer sizes
        with using(variant.switches), backend(lab):
            for size in dict.fromkeys(map(lab.batch, BATCHES)):
                prompts = lab.prompts([lab.scale.decode_prompt] * size)
                tokens = lab.scale.decode_prompt + lab.scale.long
                engine = lab.engine(lab.half, size, tokens, **variant.settings)
                steps[size] = timed_step(engine, lab, prompts)
                del engine
                lab.collect()
        found = {str(batch): steps[lab.batch(batch)] for batch in BATCHES}
        return {
            "points": {batch: timing.median for batch, timing in found.items()},
            "details": {batch: timing.figures() for batch, timing in found.items()},
        }

    return measure


def table(results: dict[str, Any]) -> str:
    """Microseconds of a step, and how many times as long as with everything on; in Markdown."""
    lines = [
        "| decode step | " + " | ".join(f"of {batch}" for batch in BATCHES) + " |",
        "|---|" + "---|" * len(BATCHES),
    ]
    whole = results.get("all_on", {}).get("points", {})
    for name, variant in VARIANTS.items():
        one = results.get(name, {"status": "not run"})
        cells = []
        for batch in map(str, BATCHES):
            seconds, base = one.get("points", {}).get(batch), whole.get(batch)
            if seconds is None:
                cells.append(one["status"])
            elif base is None or name == "all_on":
                cells.append(f"{1e6 * seconds:.0f} us")
            else:
                cells.append(f"{1e6 * seconds:.0f} us, {seconds / base:.2f}x")
        lines.append(f"| {variant.title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
