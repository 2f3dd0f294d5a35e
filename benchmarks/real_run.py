"""The real run: 10,000 requests of real Korean text through `nightjar run`, and a pile of reviews.

Half of the 10,000 requests generate an answer with a stop string, half rank 16 answers of which
one is the true one; then the reviews that were kept out of training are ranked. Two plots lie
beside the result.
"""

import json
import random
from argparse import Namespace
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from benchmarks.control_plane.requests import batch_line
from benchmarks.control_plane.watch import Watch, nightjar_run
from benchmarks.harness import DATA, Benchmark, Figures
from examples.demo_training.data import STOP, VERDICTS, Data, Turn, load_data

GENERATIONS = 5_000
RANKINGS = 5_000
CANDIDATES = 16
MAX_TOKENS = 64

Bodies = dict[str, Figures]
"""Bodies of the answers by custom_id."""


def conversations(data: Data, rng: random.Random, wanted: int) -> list[Turn]:
    """Every turn kept out of training, filled up with turns of the training text."""
    turns = data.chat_heldout[:wanted]
    return turns + rng.sample(data.chat, wanted - len(turns))


def candidates(turn: Turn, pool: list[Turn], rng: random.Random) -> list[str]:
    """The true answer and others, none of them equal to it, in random order."""
    chosen = {turn.answer}
    while len(chosen) < CANDIDATES:
        chosen.add(rng.choice(pool).answer)
    answers = sorted(chosen)
    rng.shuffle(answers)
    return answers


def requests(data: Data, rng: random.Random) -> list[str]:
    """The 10,000 lines, mixed."""
    lines = []
    for number, turn in enumerate(conversations(data, rng, GENERATIONS)):
        body = {"prompt": turn.prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stop": STOP}
        lines.append(batch_line(f"generate-{number}", "/v1/completions", body))
    held_out = len(data.chat_heldout)
    for number, turn in enumerate(conversations(data, rng, RANKINGS)):
        pool = data.chat_heldout if number < held_out else data.chat
        documents = [f" {answer}" for answer in candidates(turn, pool, rng)]
        body = {"query": turn.prompt, "documents": documents}
        lines.append(batch_line(f"rank-{number}", "/v1/rerank", body))
    rng.shuffle(lines)
    return lines


def run(source: Path, lines: list[str], model: Path) -> tuple[float, Watch, Bodies]:
    """The lines through `nightjar run`: its seconds, its processes, the answers, each once."""
    source.write_text("".join(lines), encoding="utf-8")
    out = source.with_suffix(".out.jsonl")
    seconds, watch, _ = nightjar_run(source, "--model", model, "--out", out)
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    found = {record["custom_id"]: record["response"]["body"] for record in records}
    if len(found) != len(lines):
        raise SystemExit(f"{len(found)} of {len(lines)} rows were answered")
    return seconds, watch, found


def usage(bodies: Bodies) -> pd.DataFrame:
    """Of each generated answer its tokens, and how it ended."""
    return pd.DataFrame(
        body["usage"] | {"finish_reason": body["choices"][0]["finish_reason"]}
        for name, body in bodies.items()
        if name.startswith("generate-")
    )


def memory_figures(samples: pd.DataFrame) -> Figures:
    """The peak, and growth between the third and the last quarter of the run."""
    totals = samples.sum(axis=1)
    quarter = max(1, len(totals) // 4)
    third, last = totals[2 * quarter : 3 * quarter].max(), totals[3 * quarter :].max()
    return {
        "peak_mib": round(totals.max()),
        "last_quarter_over_third": round(last / third, 3),
    }


def plot(path: Path) -> None:
    """Save what was drawn."""
    plt.savefig(path, bbox_inches="tight", dpi=110)
    plt.close()


def review_figures(data: Data, model: Path, work: Path) -> Figures:
    """How many of the reviews kept out of training are judged rightly."""
    reviews = data.reviews_heldout
    lines = [
        batch_line(f"{n}", "/v1/rerank", {"query": review.prompt, "documents": VERDICTS})
        for n, review in enumerate(reviews)
    ]
    seconds, _, bodies = run(work / "reviews.jsonl", lines, model)
    hits = sum(
        bodies[f"{n}"]["results"][0]["index"] == one.verdict for n, one in enumerate(reviews)
    )
    accuracy = round(hits / len(reviews), 4)
    return {"reviews": len(reviews), "accuracy": accuracy, "wall_s": round(seconds, 1)}


def measure(args: Namespace, folder: Path) -> Figures:
    """The run, then the reviews."""
    data = load_data(args.data)
    lines = requests(data, random.Random(17))
    seconds, watch, bodies = run(folder / "requests.jsonl", lines, args.model)
    tokens, samples = usage(bodies), pd.DataFrame(watch.samples)
    made, plots = tokens["completion_tokens"], args.out.with_suffix("")
    plots.parent.mkdir(parents=True, exist_ok=True)
    # How early answers stop.
    axes = made.plot.hist(bins=range(1, MAX_TOKENS + 2), color="#2b6cb0", figsize=(7, 3.5))
    axes.axvline(MAX_TOKENS, color="#c53030", label=f"requested: {MAX_TOKENS}")
    axes.axvline(made.mean(), color="#2f855a", label=f"mean: {made.mean():.1f}")
    axes.set(xlabel="tokens generated", ylabel="requests", title="Requested against generated")
    axes.legend()
    plot(plots.with_name(f"{plots.name}-tokens.png"))
    about = {"xlabel": "seconds", "ylabel": "MiB resident", "title": "Memory of `nightjar run`"}
    samples.plot(figsize=(7, 3.5), **about)
    plot(plots.with_name(f"{plots.name}-memory.png"))
    return {
        "requests": len(bodies),
        "wall_s": round(seconds, 1),
        "requests_per_s": round(len(bodies) / seconds, 1),
        "memory": memory_figures(samples),
        "generation": {
            "requests": len(tokens),
            "requested_tokens": int(tokens["requested_tokens"].sum()),
            "generated_tokens": int(made.sum()),
            "finish_reasons": Counter(tokens["finish_reason"]),
        },
        "reviews": review_figures(data, args.model, folder),
    }


BENCHMARK = Benchmark("real_run", __doc__, measure, options=DATA)

if __name__ == "__main__":
    BENCHMARK.main()
