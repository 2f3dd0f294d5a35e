"""A decode step with one part of the CUDA path switched off at a time: what each part is worth."""

from collections.abc import Callable
from typing import Any

from benchmarks.harness import table
from nightjar.kernels.device import Switches, using

from .engine_figures import decoding, timed_step
from .kernel_figures import backend
from .lab import Lab, Points, Timing, found

BATCHES = (1, 8, 64)
VARIANTS: dict[str, tuple[str, Switches, dict[str, Any]]] = {
    "all_on": ("everything on", Switches(), {}),
    "no_graphs": ("without CUDA graphs", Switches(), {"cuda_graphs": False}),
    "no_windows": ("without windows", Switches(), {"window_steps": 1}),
    "no_prefetch": ("without prefetch", Switches(prefetch=False), {}),
    "no_small_products": ("without small products", Switches(small_products=False), {}),
    "no_fused_heads": ("without fused heads", Switches(fused_heads=False), {}),
}
"""By name: the title, what is switched off, settings of the engine."""


def decode_steps(name: str) -> Callable[[Lab], Points]:
    """Seconds of a decode step of a variant at each batch, as the points "1", "8" and "64"."""
    _, switches, settings = VARIANTS[name]

    def measure(lab: Lab) -> Points:
        steps: dict[int, Timing] = {}  # a scale may have fewer sizes
        with using(switches), backend(lab):
            for size in dict.fromkeys(map(lab.batch, BATCHES)):
                engine, prompts = decoding(lab, size, **settings)
                steps[size] = timed_step(engine, lab, prompts)
                del engine
                lab.collect()
        wanted = {str(batch): steps[lab.batch(batch)] for batch in BATCHES}
        return found(wanted, **{batch: timing.median for batch, timing in wanted.items()})

    return measure


def page(results: dict[str, Any]) -> str:
    """Microseconds of a step, and how many times as long as with everything on; in Markdown."""
    whole = results.get("all_on", {}).get("points", {})
    rows = []
    for name, (title, *_) in VARIANTS.items():
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
        rows.append([title, *cells])
    return table(["decode step", *(f"of {batch}" for batch in BATCHES)], rows)
