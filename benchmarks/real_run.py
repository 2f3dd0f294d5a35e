"""The real run: 10,000 requests of real Korean text through `nightjar run`, and a pile of reviews.

    python -m benchmarks.real_run --data DIR [--model examples/demo_model] [--work DIR]

DIR holds `chatbot/train.csv` and `nsmc/train.tsv` (examples/demo_model/README.md names them).
Half of the 10,000 requests generate an answer with a stop string, half rank 16 answers of which
one is the true one; then the reviews that were kept out of training are ranked. Writes
`benchmarks/results/real-run-<date>.json` and two plots beside it.
"""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import psutil

from benchmarks.control_plane.requests import batch_line
from benchmarks.machine import describe
from benchmarks.writing import RESULTS, parser, today, write_json
from examples.demo_training.data import Data, Turn, load_data

GENERATIONS = 5_000
RANKINGS = 5_000
CANDIDATES = 16
MAX_TOKENS = 64
STOP = "\n사용자:"
VERDICTS = [" 재미있다", " 재미없다"]
MEMORY_EVERY_S = 1.0


Sample = tuple[float, Counter[str]]
"""A second of the run, and the memory that its processes hold then, MiB by role."""


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


def write_requests(path: Path, data: Data, rng: random.Random) -> None:
    """Write the 10,000 lines, mixed."""
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
    path.write_text("".join(lines), encoding="utf-8")


def role(command: list[str]) -> str:
    """Which part of the system a process is."""
    words = " ".join(command)
    names = {
        "gpu_worker.compute": "compute process",
        "gpu_worker.worker.tasks": "GPU worker",
        "pipeline.planning.tasks": "planner",
        "pipeline.queue.clock": "beat",
        "valkey-server": "broker",
        "redis-server": "broker",
    }
    return next((name for part, name in names.items() if part in words), "nightjar run")


def memory(root: psutil.Process) -> Counter[str]:
    resident: Counter[str] = Counter()
    for process in [root, *root.children(recursive=True)]:
        try:
            resident[role(process.cmdline())] += process.memory_info().rss // 2**20
        except psutil.Error:
            continue
    return resident


def run(source: Path, model: Path, out: Path) -> tuple[float, list[Sample]]:
    """`nightjar run` from start to end: wall seconds, and the memory on the way."""
    command = [sys.executable, "-m", "nightjar", "run", str(source)]
    command += ["--model", str(model), "--out", str(out)]
    started = time.monotonic()
    process = subprocess.Popen(command)
    root, samples = psutil.Process(process.pid), []
    while process.poll() is None:
        samples.append((time.monotonic() - started, memory(root)))
        time.sleep(MEMORY_EVERY_S)
    if process.returncode != 0:
        raise SystemExit(f"nightjar run ended with {process.returncode}")
    return time.monotonic() - started, samples


def answers(out: Path) -> dict[str, dict[str, Any]]:
    """Bodies of the answers by custom_id; every one must be there once."""
    lines = [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()]
    found = {record["custom_id"]: record["response"]["body"] for record in lines}
    if len(found) != len(lines):
        raise SystemExit(f"{len(lines) - len(found)} rows came twice")
    return found


def generation_figures(bodies: dict[str, dict[str, Any]]) -> dict[str, Any]:
    generated = [body for name, body in bodies.items() if name.startswith("generate-")]
    usage = [body["usage"] for body in generated]
    return {
        "requests": len(generated),
        "requested_tokens": sum(u["requested_tokens"] for u in usage),
        "generated_tokens": sum(u["completion_tokens"] for u in usage),
        "finish_reasons": Counter(body["choices"][0]["finish_reason"] for body in generated),
    }


def memory_figures(samples: list[Sample]) -> dict[str, Any]:
    """Peaks by role, and growth between the third and the last quarter of the run."""
    totals = [resident.total() for _, resident in samples]
    quarter = max(1, len(totals) // 4)
    third, last = max(totals[2 * quarter : 3 * quarter]), max(totals[3 * quarter :])
    peaks: Counter[str] = Counter()
    for _, resident in samples:
        peaks |= resident  # of each role the larger
    return {
        "peak_mib": max(totals),
        "peak_mib_by_process": peaks,
        "last_quarter_over_third": round(last / third, 3),
    }


def plot_tokens(bodies: dict[str, dict[str, Any]], path: Path) -> None:
    """Requested against generated tokens: how early answers stop."""
    made = [
        body["usage"]["completion_tokens"]
        for name, body in bodies.items()
        if name.startswith("generate-")
    ]
    figure, axes = plt.subplots(figsize=(7, 3.5))
    axes.hist(made, bins=range(1, MAX_TOKENS + 2), color="#2b6cb0")
    axes.axvline(MAX_TOKENS, color="#c53030", label=f"requested: {MAX_TOKENS}")
    axes.axvline(sum(made) / len(made), color="#2f855a", label=f"mean: {sum(made) / len(made):.1f}")
    axes.set(xlabel="tokens generated", ylabel="requests", title="Requested against generated")
    axes.legend()
    figure.savefig(path, bbox_inches="tight", dpi=110)


def plot_memory(samples: list[Sample], path: Path) -> None:
    """Resident memory of each process over the run."""
    figure, axes = plt.subplots(figsize=(7, 3.5))
    for name in sorted({name for _, resident in samples for name in resident}):
        points = [(second, resident[name]) for second, resident in samples if name in resident]
        axes.plot(*zip(*points, strict=True), label=name)
    axes.set(xlabel="seconds", ylabel="MiB resident", title="Memory of `nightjar run`")
    axes.legend(fontsize="small")
    figure.savefig(path, bbox_inches="tight", dpi=110)


def review_figures(data: Data, model: Path, work: Path) -> dict[str, Any]:
    source, out = work / "reviews.jsonl", work / "reviews.out.jsonl"
    with source.open("w", encoding="utf-8") as stream:
        for number, review in enumerate(data.reviews_heldout):
            body = {"query": review.prompt, "documents": VERDICTS}
            stream.write(batch_line(f"review-{number}", "/v1/rerank", body))
    seconds, _ = run(source, model, out)
    bodies = answers(out)
    hits = sum(
        bodies[f"review-{number}"]["results"][0]["index"] == review.verdict
        for number, review in enumerate(data.reviews_heldout)
    )
    count = len(data.reviews_heldout)
    return {"reviews": count, "accuracy": round(hits / count, 4), "wall_s": round(seconds, 1)}


def main() -> None:
    arguments = parser("benchmarks.real_run", __doc__)
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--model", type=Path, default=Path("examples/demo_model"))
    arguments.add_argument("--work", type=Path, default=Path("build/real-run"))
    args = arguments.parse_args()
    args.work.mkdir(parents=True)
    path = args.out or RESULTS / f"real-run-{today()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)  # now, not after hours of computing
    data, source, out = load_data(args.data), args.work / "requests.jsonl", args.work / "out.jsonl"
    write_requests(source, data, random.Random(17))
    seconds, samples = run(source, args.model, out)
    bodies = answers(out)
    figures = {
        "date": today(),
        "command": "python -m benchmarks.real_run --data DIR",
        "machine": describe(2),
        "requests": len(bodies),
        "wall_s": round(seconds, 1),
        "requests_per_s": round(len(bodies) / seconds, 1),
        "memory": memory_figures(samples),
        "generation": generation_figures(bodies),
        "reviews": review_figures(data, args.model, args.work),
    }
    write_json(path, figures)
    plot_tokens(bodies, path.with_name(f"{path.stem}-tokens.png"))
    plot_memory(samples, path.with_name(f"{path.stem}-memory.png"))


if __name__ == "__main__":
    main()
