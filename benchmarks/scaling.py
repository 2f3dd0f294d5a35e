"""How cost grows: our engine's speed against batch, context, documents and queue length.

    python -m benchmarks.scaling

Each point is the median of several rounds, the points of a curve taken in turn.  Writes
`benchmarks/results/scaling-<date>.json` and a plot of each curve beside it.
"""

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models.precision import PRECISIONS

from .environments import CACHE
from .machine import describe
from .models import cached_model
from .peers.nightjar_peer import NightjarEngine
from .peers.protocol import Workload, run_workload
from .shapes import FIRST_WORD, GPT2_SMALL, SHAPES
from .workloads import Words, ranking, texts
from .writing import RESULTS, begun, parser, words, write_json


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


def _batch(words: Words, rng: random.Random, size: int) -> Point:
    """Decoding alone: 33 tokens less the first, prompts of 64."""
    rows = [words.draw(rng, 64) for _ in range(size)]
    return Point(32 * size, texts("scaling", rows, 33), texts("scaling", rows, 1), size)


def _context(words: Words, rng: random.Random, size: int) -> Point:
    """Decoding alone with 8 sequences after prompts of growing length."""
    rows = [words.draw(rng, size) for _ in range(8)]
    return Point(8 * 32, texts("scaling", rows, 33), texts("scaling", rows, 1))


def _prefill(words: Words, rng: random.Random, size: int) -> Point:
    """Prompts of growing length, about 2,048 tokens together, one token asked."""
    rows = [words.draw(rng, size) for _ in range(max(1, 2048 // size))]
    return Point(sum(map(len, rows)), texts("scaling", rows, 1))


def _documents(words: Words, rng: random.Random, size: int) -> Point:
    """A query of 150 tokens and a growing number of documents of 11, whose tokens count."""
    documents = [words.draw(rng, 11) for _ in range(size)]
    one = ranking(words, words.draw(rng, 150), documents)
    return Point(11 * size, Workload("scaling", "rank", rankings=[one]))


def _queue(words: Words, rng: random.Random, size: int) -> Point:
    """A growing number of waiting requests, each of 32 tokens with 8 asked."""
    rows = [words.draw(rng, 32) for _ in range(size)]
    return Point(8 * size, texts("scaling", rows, 8))


@dataclass(frozen=True)
class Curve:
    """What a plot shows: `make` makes the point of a size; `explained` stands under the plot."""

    make: Callable[[Words, random.Random, int], Point]
    sizes: list[int]
    x_label: str
    y_label: str
    explained: str

    def points(self, name: str, words: Words) -> dict[int, Point]:
        """The points by their sizes, drawn from the curve's name."""
        rng = random.Random(f"0-{name}_curve")
        return {size: self.make(words, rng, size) for size in self.sizes}


CURVES = {
    "batch": Curve(
        _batch,
        [1, 2, 4, 8, 16, 32, 64, 128],
        "sequences decoded together",
        "tokens/s",
        "A step of decoding reads every weight once, whatever the batch: more sequences share that "
        "reading until the arithmetic takes longer than the memory does.",
    ),
    "context": Curve(
        _context,
        [32, 64, 128, 256, 512, 960],
        "tokens of context, 8 sequences",
        "tokens/s",
        "Attention reads the keys and values of every earlier token, so each step costs a fixed "
        "part for the weights and a part that grows with the context.",
    ),
    "prefill": Curve(
        _prefill,
        [8, 16, 32, 64, 128, 256, 512, 1000],
        "tokens of each prompt, about 2,048 together",
        "prompt tokens/s",
        "Prompts are packed without padding, so short ones cost no more a token than long ones. "
        "The fall to the right is attention, which grows with the square of the length.",
    ),
    "documents": Curve(
        _documents,
        [1, 2, 4, 8, 16, 32, 64, 128, 256],
        "documents of one query",
        "document tokens/s",
        "The query is computed once, so its cost is spread over the documents: the curve rises "
        "until the documents' own tokens are all that is left to pay.",
    ),
    "queue": Curve(
        _queue,
        [1, 4, 16, 64, 256, 1024],
        "requests waiting at once",
        "tokens/s",
        "Up to the engine's slots a longer queue fills the batch. Past them it only waits: a flat "
        "line there says that scheduling costs nothing that grows with the queue.",
    ),
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
    started = time.perf_counter()
    run_workload(system, workload)
    return time.perf_counter() - started


def measure(
    system: NightjarEngine, curve: Curve, points: dict[int, Point], rounds: int
) -> dict[str, Any]:
    """The curve's points; the first round warms up and is not counted."""
    rates: dict[int, list[float]] = {x: [] for x in points}
    for _ in range(rounds + 1):
        for x, point in points.items():
            rates[x].append(round(measure_point(system, point), 2))
    counted = {x: seen[1:] for x, seen in rates.items()}
    return {
        "x_label": curve.x_label,
        "y_label": curve.y_label,
        "explained": curve.explained,
        "points": [
            {"x": x, "median": round(median(seen), 2), "rounds": seen}
            for x, seen in counted.items()
        ],
    }


def plot(name: str, by_precision: dict[str, dict[str, Any]], path: Path) -> None:
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


def main() -> None:
    arguments = parser("benchmarks.scaling", __doc__)
    arguments.add_argument("--model", choices=list(SHAPES), default=GPT2_SMALL.name)
    arguments.add_argument("--precisions", type=words(PRECISIONS), default=["fp32", "int8"])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--curves", type=words(CURVES), default=list(CURVES))
    args = arguments.parse_args()
    result = begun("benchmarks.scaling") | {
        "machine": describe(args.threads),
        "model": asdict(SHAPES[args.model]),
        "rounds": args.rounds,
    }
    model = cached_model(args.model)
    vocabulary = Words.of(ModelDirectory.open(model).tokenizer().token_bytes, FIRST_WORD)
    found: dict[str, dict[str, Any]] = {name: {} for name in args.curves}
    for precision in args.precisions:
        system = NightjarEngine()
        system.load(model, precision, args.threads, CACHE / "converted")
        for name, by_precision in found.items():
            points = CURVES[name].points(name, vocabulary)
            by_precision[precision] = measure(system, CURVES[name], points, args.rounds)
            print(f"{precision} {name}: {by_precision[precision]['points']}", flush=True)
    path = args.out or RESULTS / f"scaling-{result['date']}.json"
    write_json(path, result | {"curves": found})
    for name, by_precision in found.items():
        plot(name, by_precision, path.with_name(f"{path.stem}-{name}.svg"))


if __name__ == "__main__":
    main()
