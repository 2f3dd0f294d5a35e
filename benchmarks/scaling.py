"""How cost grows: our engine's speed against batch, context, documents and queue length.

Each point is the median of several rounds, the points of a curve taken in turn.  A plot of each
curve lies beside the result.
"""

import random
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt

from nightjar.gpu_worker.models.precision import PRECISIONS

from .harness import Benchmark, Figures, by_turns, seconds_of
from .models import cached_model
from .peers.nightjar_peer import NightjarEngine
from .peers.protocol import Ranking, Workload, run_workload
from .weights import GPT2_SMALL, SHAPES
from .workloads import texts


@dataclass(frozen=True)
class Point:
    """One point of a curve: run `workload` less `baseline`, and `amount` units came of it.

    Where there is a baseline, both find their prompts in the prefix cache.

    max_running: slots of the engine, None for its default.
    """

    amount: int
    workload: Workload
    baseline: Workload | None = None
    max_running: int | None = None


def _batch(words: range, rng: random.Random, size: int) -> Point:
    """Decoding alone: 33 tokens less the first, prompts of 64."""
    rows = [rng.choices(words, k=64) for _ in range(size)]
    return Point(32 * size, texts("scaling", rows, 33), texts("scaling", rows, 1), size)


def _context(words: range, rng: random.Random, size: int) -> Point:
    """Decoding alone with 8 sequences after prompts of growing length."""
    rows = [rng.choices(words, k=size) for _ in range(8)]
    return Point(8 * 32, texts("scaling", rows, 33), texts("scaling", rows, 1))


def _prefill(words: range, rng: random.Random, size: int) -> Point:
    """Prompts of growing length, about 2,048 tokens together, one token asked."""
    rows = [rng.choices(words, k=size) for _ in range(max(1, 2048 // size))]
    return Point(sum(map(len, rows)), texts("scaling", rows, 1))


def _documents(words: range, rng: random.Random, size: int) -> Point:
    """A query of 150 tokens and a growing number of documents of 11, whose tokens count."""
    documents = [rng.choices(words, k=11) for _ in range(size)]
    one = Ranking(rng.choices(words, k=150), documents)
    return Point(11 * size, Workload("scaling", rankings=[one]))


def _queue(words: range, rng: random.Random, size: int) -> Point:
    """A growing number of waiting requests, each of 32 tokens with 8 asked."""
    rows = [rng.choices(words, k=32) for _ in range(size)]
    return Point(8 * size, texts("scaling", rows, 8))


@dataclass(frozen=True)
class Curve:
    """What a plot shows: `make` makes the point of a size."""

    make: Callable[[range, random.Random, int], Point]
    sizes: list[int]
    x_label: str
    y_label: str = "tokens/s"


CONTEXTS = [32, 64, 128, 256, 512, 960]
LENGTHS = [8, 16, 32, 64, 128, 256, 512, 1000]
POWERS = [1, 2, 4, 8, 16, 32, 64, 128]
CURVES = {
    "batch": Curve(_batch, POWERS, "sequences decoded together"),
    "context": Curve(_context, CONTEXTS, "tokens of context, 8 sequences"),
    "prefill": Curve(
        _prefill, LENGTHS, "tokens of each prompt, about 2,048 together", "prompt tokens/s"
    ),
    "documents": Curve(_documents, [*POWERS, 256], "documents of one query", "document tokens/s"),
    "queue": Curve(_queue, [1, 4, 16, 64, 256, 1024], "requests waiting at once"),
}


def measure_point(system: NightjarEngine, point: Point) -> float:
    """Units a second."""
    default = system.config
    if point.max_running is not None:
        system.start_engine(replace(default, max_running=point.max_running))
    system.reset()
    try:
        if point.baseline is None:
            return point.amount / _seconds(system, point.workload)
        # Once before: with the prompts in the prefix cache, little is left to subtract.
        _seconds(system, point.baseline)
        less = _seconds(system, point.baseline)
        return point.amount / (_seconds(system, point.workload) - less)
    finally:
        if system.config is not default:
            system.start_engine(default)


def _seconds(system: NightjarEngine, workload: Workload) -> float:
    return seconds_of(lambda: run_workload(system, workload))


def curve_figures(
    system: NightjarEngine, curve: Curve, name: str, words: range, rounds: int
) -> Figures:
    """The curve's points, in turn; the first round warms up and is not counted."""
    rng = random.Random(f"0-{name}_curve")
    points = {x: curve.make(words, rng, x) for x in curve.sizes}
    ways = {x: partial(measure_point, system, point) for x, point in points.items()}
    rates = by_turns(ways, rounds, warm=1)
    return {
        "x_label": curve.x_label,
        "y_label": curve.y_label,
        "points": [
            {"x": x, "median": round(median(seen), 2), "rounds": [round(one, 2) for one in seen]}
            for x, seen in rates.items()
        ],
    }


def plot(name: str, by_precision: dict[str, Figures], path: Path) -> None:
    """One curve, a line for each precision."""
    figure, axes = plt.subplots(figsize=(7, 3.5))
    for precision, curve in by_precision.items():
        xs = [point["x"] for point in curve["points"]]
        axes.plot(xs, [point["median"] for point in curve["points"]], "o-", label=precision)
        axes.set(xlabel=curve["x_label"], ylabel=curve["y_label"], title=name.capitalize())
    axes.set_xscale("log", base=2)
    axes.set_xticks(xs, [str(x) for x in xs])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def measure(args: Namespace, folder: Path) -> Figures:
    """Every curve in every precision."""
    model = cached_model(args.model)
    words = SHAPES[args.model].words
    found: dict[str, dict[str, Figures]] = {name: {} for name in args.curves}
    for precision in args.precisions:
        system = NightjarEngine()
        system.load(model, precision, args.threads, folder)
        for name, by_precision in found.items():
            figures = curve_figures(system, CURVES[name], name, words, args.rounds)
            by_precision[precision] = figures
            print(f"{precision} {name}: {figures['points']}", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name, by_precision in found.items():
        plot(name, by_precision, args.out.with_name(f"{args.out.stem}-{name}.svg"))
    return {"model": asdict(SHAPES[args.model]), "rounds": args.rounds, "curves": found}


OPTIONS = {
    "--model": (GPT2_SMALL.name, "its shape", SHAPES),
    "--precisions": (["fp32", "int8"], "of weights", PRECISIONS),
    "--rounds": (3, "that count"),
    "--threads": (2, "that compute"),
    "--curves": (list(CURVES), "that are measured", CURVES),
}
BENCHMARK = Benchmark("scaling", __doc__, measure, options=OPTIONS)

if __name__ == "__main__":
    BENCHMARK.main()
