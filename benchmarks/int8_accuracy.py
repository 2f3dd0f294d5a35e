"""What int8 and bf16 cost in accuracy: their texts, scores and rankings beside fp32's.

    python -m benchmarks.int8_accuracy --data DIR [--model examples/demo_model]

DIR holds `chatbot/train.csv` and `nsmc/train.tsv` (examples/demo_model/README.md names them). The
demo model answers and ranks rows kept out of its training; a GPT-2-small shape with random weights
stands for a larger model, whose texts no training has made robust. "int8, fp32 head" keeps the LM
head out of int8. bf16 does SLOW_SHARE of the work where the processor only emulates it. Writes
`benchmarks/results/int8-accuracy-<date>.json`.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import nightjar
from benchmarks.machine import has_bf16
from benchmarks.real_run import CANDIDATES, RESULTS, STOP, VERDICTS, candidates
from examples.demo_training.data import Data, Review, load_data
from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import (
    Engine,
    EngineConfig,
    GenerateRequest,
    GenerateResult,
    RankRequest,
    RankResult,
    Request,
    SamplingParams,
)
from nightjar.gpu_worker.models import Decoder, load_model
from tests.models import SMALL, save_gpt2

PROMPTS = 200
RANKINGS = 100
REVIEWS = 3000
MAX_TOKENS = 48
RANDOM_PROMPTS = 16
RANDOM_RANKINGS = 8
RANDOM_TOKENS = 16
RANDOM_DOCUMENTS = 8
SLOW_SHARE = 5
"""One in so many prompts, rankings and reviews."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts to continue greedily, and (query, documents) to rank, all as token ids."""

    prompts: list[list[int]]
    rankings: list[tuple[list[int], list[list[int]]]]
    sampling: SamplingParams

    def part(self, share: int) -> Workload:
        """The first of so many parts."""
        prompts = self.prompts[: len(self.prompts) // share]
        return Workload(prompts, self.rankings[: len(self.rankings) // share], self.sampling)


@dataclass(frozen=True, slots=True)
class Answers:
    """What one precision made of a workload: token ids, and the documents' mean NLLs."""

    texts: list[list[int]]
    scores: list[list[float]]


def share_of(precision: str) -> int:
    """One in how many parts of the work a precision does."""
    return SLOW_SHARE if precision == "bf16" and not has_bf16() else 1


def precisions(directory: ModelDirectory) -> Iterator[tuple[str, Decoder]]:
    """fp32 first, then what is held against it."""
    exact = load_model(directory, "fp32")
    yield "fp32", exact
    yield "bf16", load_model(directory, "bf16")
    int8 = load_model(directory, "int8")
    yield "int8", int8
    weights = replace(int8.weights, head=exact.weights.head)
    yield (
        "int8, fp32 head",
        Decoder(directory.config, weights, int8.dtype, int8.cache_dtype, int8.device),
    )


def answer(model: Decoder, token_bytes: Sequence[bytes], workload: Workload) -> Answers:
    requests: list[Request] = [
        GenerateRequest(number, prompt, workload.sampling)
        for number, prompt in enumerate(workload.prompts)
    ]
    requests += [
        RankRequest(number, query, documents)
        for number, (query, documents) in enumerate(workload.rankings, start=len(requests))
    ]
    engine = Engine(model, token_bytes, EngineConfig())
    for request in requests:
        engine.submit(request)
    texts, scores = {}, {}
    while engine.has_work:
        for result in engine.step():
            match result:
                case GenerateResult():
                    texts[result.request_id] = result.token_ids
                case RankResult():
                    scores[result.request_id] = [x for x in result.mean_nll if x is not None]
                case _:
                    raise SystemExit(f"request {result.request_id}: {result.message}")
    return Answers([texts[i] for i in sorted(texts)], [scores[i] for i in sorted(scores)])


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    shortest = min(len(a), len(b))
    return next((i for i in range(shortest) if a[i] != b[i]), shortest)


def best(scores: Sequence[float]) -> int:
    return min(range(len(scores)), key=scores.__getitem__)


def share(hits: Sequence[bool]) -> float:
    return round(sum(hits) / len(hits), 4)


def agreement(found: Answers, exact: Answers) -> dict[str, float]:
    """How near answers are to the exact ones, as many as were found.

    tokens_until_different: of the exact texts' tokens, those before the first other one (one other
    token changes everything after it).  mean_abs_delta_nll: nats a token, over documents.
    """
    texts = list(zip(found.texts, exact.texts, strict=False))
    rankings = list(zip(found.scores, exact.scores, strict=False))
    pairs = [pair for a, b in rankings for pair in zip(a, b, strict=True)]
    deltas = [abs(a - b) for a, b in pairs]
    alike = sum(common_prefix(a, b) for a, b in texts)
    return {
        "equal_texts": share([a == b for a, b in texts]),
        "equal_first_tokens": share([a[:1] == b[:1] for a, b in texts]),
        "tokens_until_different": round(alike / sum(len(b) for _, b in texts), 4),
        "mean_abs_delta_nll": round(sum(deltas) / len(deltas), 5),
        "max_abs_delta_nll": round(max(deltas), 5),
        "mean_nll": round(sum(a for a, _ in pairs) / len(pairs), 5),
        "equal_winners": share([best(a) == best(b) for a, b in rankings]),
        "texts": len(texts),
        "rankings": len(rankings),
    }


def demo_figures(path: Path, data: Data) -> dict[str, dict[str, float]]:
    """The trained model on rows kept out of its training."""
    directory = ModelDirectory.open(path)
    tokenizer = directory.tokenizer()
    rng = random.Random(5)
    turns = data.chat_heldout[:PROMPTS]
    rankings = [
        (
            tokenizer.encode(turn.prompt),
            [tokenizer.encode(f" {text}") for text in candidates(turn, data.chat_heldout, rng)],
        )
        for turn in turns[:RANKINGS]
    ]
    sampling = SamplingParams(MAX_TOKENS, stop=(STOP.encode(),))
    workload = Workload([tokenizer.encode(turn.prompt) for turn in turns], rankings, sampling)
    reviews = data.reviews_heldout[:REVIEWS]
    verdicts = [tokenizer.encode(verdict) for verdict in VERDICTS]
    asked = [(tokenizer.encode(review.prompt), verdicts) for review in reviews]
    judged = Workload([], asked, sampling)
    figures: dict[str, dict[str, float]] = {}
    exact: Answers | None = None
    for name, model in precisions(directory):
        part = share_of(name)
        found = answer(model, tokenizer.token_bytes, workload.part(part))
        exact = exact or found
        verdict_scores = answer(model, tokenizer.token_bytes, judged.part(part)).scores
        figures[name] = agreement(found, exact)
        figures[name]["review_accuracy"] = accuracy(verdict_scores, reviews)
        figures[name]["reviews"] = len(verdict_scores)
        print(json.dumps({name: figures[name]}), flush=True)
    return figures


def accuracy(scores: Sequence[Sequence[float]], reviews: Sequence[Review]) -> float:
    """Of the reviews that were scored, the first ones."""
    hits = [best(row) == review.verdict for row, review in zip(scores, reviews, strict=False)]
    return share(hits)


def random_figures(path: Path, seed: int = 0) -> dict[str, dict[str, float]]:
    """GPT-2-small's blocks with random weights: texts and documents of random tokens."""
    save_gpt2(path, replace(SMALL, vocab_size=32_000), seed)
    directory = ModelDirectory.open(path)
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(300, 32_000) for _ in range(rng.randint(low, high))]

    workload = Workload(
        [tokens(8, 100) for _ in range(RANDOM_PROMPTS)],
        [
            (tokens(20, 100), [tokens(6, 14) for _ in range(RANDOM_DOCUMENTS)])
            for _ in range(RANDOM_RANKINGS)
        ],
        SamplingParams(RANDOM_TOKENS, ignore_eos=True),
    )
    token_bytes = directory.tokenizer().token_bytes
    figures: dict[str, dict[str, float]] = {}
    exact: Answers | None = None
    for name, model in precisions(directory):
        found = answer(model, token_bytes, workload.part(share_of(name)))
        exact = exact or found
        figures[name] = agreement(found, exact)
        print(json.dumps({name: figures[name]}), flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("examples/demo_model"))
    args = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    data = load_data(args.data)
    with tempfile.TemporaryDirectory() as folder:
        figures: dict[str, Any] = {
            "date": datetime.now(UTC).date().isoformat(),
            "command": "python -m benchmarks.int8_accuracy --data DIR",
            "versions": {
                "nightjar": nightjar.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
            "demo_model": {
                "prompts": PROMPTS,
                "rankings": RANKINGS,
                "documents": CANDIDATES,
                "reviews": REVIEWS,
                "by_precision": demo_figures(args.model, data),
            },
            "gpt2_small_shape_random": {
                "prompts": RANDOM_PROMPTS,
                "rankings": RANDOM_RANKINGS,
                "documents": RANDOM_DOCUMENTS,
                "by_precision": random_figures(Path(folder)),
            },
        }
    target = RESULTS / f"int8-accuracy-{figures['date']}.json"
    target.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(target)


if __name__ == "__main__":
    main()
