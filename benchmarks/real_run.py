"""The real run: 10,000 requests of real Korean text through `nightjar run`, and a pile of reviews.

    python -m benchmarks.real_run --data DIR [--model examples/demo_model] [--work DIR]

DIR holds `chatbot/train.csv` and `nsmc/train.tsv` (examples/demo_model/README.md names them).
Half of the 10,000 requests generate an answer with a stop string, half rank 16 answers of which
one is the true one; then the reviews that were kept out of training are ranked. Writes
`benchmarks/results/real-run-<date>.json` and two plots beside it.
"""

import json
import random
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from benchmarks.control_plane.requests import batch_line
from benchmarks.control_plane.watch import Watch, nightjar_run
from benchmarks.machine import describe
from benchmarks.writing import RESULTS, Figures, begun, parser, write_json
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
    generated = [body for name, body in bodies.items() if name.startswith("generate-")]
    reasons = [{"finish_reason": body["choices"][0]["finish_reason"]} for body in generated]
    return pd.DataFrame(
        body["usage"] | reason for body, reason in zip(generated, reasons, strict=True)
    )


def memory_figures(samples: pd.DataFrame) -> Figures:
    """Peaks by role, and growth between the third and the last quarter of the run."""
    totals = samples.sum(axis=1)
    quarter = max(1, len(totals) // 4)
    third, last = totals[2 * quarter : 3 * quarter].max(), totals[3 * quarter :].max()
    return {
        "peak_mib": round(totals.max()),
        "peak_mib_by_process": samples.max().round().to_dict(),
        "last_quarter_over_third": round(last / third, 3),
    }


def plot_tokens(made: pd.Series, path: Path) -> None:
    """Requested against generated tokens: how early answers stop."""
    axes = made.plot.hist(bins=range(1, MAX_TOKENS + 2), color="#2b6cb0", figsize=(7, 3.5))
    axes.axvline(MAX_TOKENS, color="#c53030", label=f"requested: {MAX_TOKENS}")
    axes.axvline(made.mean(), color="#2f855a", label=f"mean: {made.mean():.1f}")
    axes.set(xlabel="tokens generated", ylabel="requests", title="Requested against generated")
    axes.legend()
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


def main() -> None:
    arguments = parser("benchmarks.real_run", __doc__)
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--model", type=Path, default=Path("examples/demo_model"))
    arguments.add_argument("--work", type=Path, default=Path("build/real-run"))
    args = arguments.parse_args()
    args.work.mkdir(parents=True)
    figures = begun("benchmarks.real_run") | {"machine": describe(2)}
    path = args.out or RESULTS / f"real-run-{figures['date']}.json"
    data = load_data(args.data)
    lines = requests(data, random.Random(17))
    seconds, watch, bodies = run(args.work / "requests.jsonl", lines, args.model)
    tokens, samples = usage(bodies), pd.DataFrame(watch.samples)
    figures |= {
        "requests": len(bodies),
        "wall_s": round(seconds, 1),
        "requests_per_s": round(len(bodies) / seconds, 1),
        "memory": memory_figures(samples),
        "generation": {
            "requests": len(tokens),
            "requested_tokens": int(tokens["requested_tokens"].sum()),
            "generated_tokens": int(tokens["completion_tokens"].sum()),
            "finish_reasons": Counter(tokens["finish_reason"]),
        },
        "reviews": review_figures(data, args.model, args.work),
    }
    write_json(path, figures)
    plot_tokens(tokens["completion_tokens"], path.with_name(f"{path.stem}-tokens.png"))
    about = {"xlabel": "seconds", "ylabel": "MiB resident", "title": "Memory of `nightjar run`"}
    samples.plot(figsize=(7, 3.5), **about)
    plt.savefig(path.with_name(f"{path.stem}-memory.png"), bbox_inches="tight", dpi=110)


if __name__ == "__main__":
    main()
