"""What int8 and bf16 cost in accuracy: their texts, scores and rankings beside fp32's.

The demo model answers and ranks rows kept out of its training.
"""

import json
import random
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.answers import answers, scores_of
from benchmarks.harness import DATA, Benchmark, Figures
from benchmarks.real_run import CANDIDATES, candidates
from examples.demo_training.data import STOP, VERDICTS, load_data
from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import Engine, EngineConfig, GenerateResult
from nightjar.gpu_worker.models import Decoder, load_model
from nightjar.requests import GenerateRequest, RankRequest, Request, SamplingParams

SIZES = {"prompts": 200, "rankings": 100, "documents": CANDIDATES, "reviews": 3000}
MAX_TOKENS = 48

Ranked = list[tuple[list[int], list[list[int]]]]
"""Queries with their documents, all as token ids."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What one precision made of the work: token ids, and the documents' mean NLLs."""

    texts: list[list[int]]
    scores: list[list[float]]


def answer(
    model: Decoder, token_bytes: Sequence[bytes], prompts: list[list[int]], rankings: Ranked
) -> Answers:
    """The prompts are continued greedily, the documents are ranked."""
    sampling = SamplingParams(MAX_TOKENS, stop=(STOP.encode(),))
    asked: list[Request] = [GenerateRequest(n, ids, sampling) for n, ids in enumerate(prompts)]
    asked += [RankRequest(n, *given) for n, given in enumerate(rankings, start=len(asked))]
    results = answers(Engine(model, token_bytes, EngineConfig()), asked)
    texts = [one.token_ids for one in results if isinstance(one, GenerateResult)]
    return Answers(texts, [scores_of(one) for one in results[len(texts) :]])


def best(scores: Sequence[float]) -> int:
    return min(range(len(scores)), key=scores.__getitem__)


def share(hits: Sequence[bool]) -> float:
    return round(sum(hits) / len(hits), 4)


def agreement(found: Answers, exact: Answers) -> dict[str, float]:
    """How near answers are to the exact ones; NLL is in nats a token."""
    texts = list(zip(found.texts, exact.texts, strict=True))
    rankings = list(zip(found.scores, exact.scores, strict=True))
    deltas = [abs(a - b) for row, other in rankings for a, b in zip(row, other, strict=True)]
    return {
        "equal_texts": share([a == b for a, b in texts]),
        "equal_first_tokens": share([a[:1] == b[:1] for a, b in texts]),
        "mean_abs_delta_nll": round(mean(deltas), 5),
        "max_abs_delta_nll": round(max(deltas), 5),
        "equal_winners": share([best(a) == best(b) for a, b in rankings]),
        "texts": len(texts),
        "rankings": len(rankings),
    }


def measure(args: Namespace, _: Path) -> Figures:
    """Each precision held against fp32, on rows kept out of the model's training."""
    directory, data = ModelDirectory.open(args.model), load_data(args.data)
    tokenizer, rng = directory.tokenizer(), random.Random(5)
    turns, reviews = data.chat_heldout[: SIZES["prompts"]], data.reviews_heldout[: SIZES["reviews"]]
    prompts, rankings = [tokenizer.encode(turn.prompt) for turn in turns], []
    for turn, prompt in zip(turns[: SIZES["rankings"]], prompts, strict=False):
        texts = candidates(turn, data.chat_heldout, rng)
        rankings.append((prompt, [tokenizer.encode(f" {text}") for text in texts]))
    verdicts = [tokenizer.encode(verdict) for verdict in VERDICTS]
    judged = [(tokenizer.encode(review.prompt), verdicts) for review in reviews]
    found: dict[str, dict[str, float]] = {}
    exact: Answers | None = None
    for name in ("fp32", "bf16", "int8"):
        model = load_model(directory, name)
        given = answer(model, tokenizer.token_bytes, prompts, rankings)
        exact = exact or given
        scores = answer(model, tokenizer.token_bytes, [], judged).scores
        hits = [best(row) == one.verdict for row, one in zip(scores, reviews, strict=True)]
        found[name] = agreement(given, exact)
        found[name] |= {"review_accuracy": share(hits), "reviews": len(scores)}
        print(json.dumps({name: found[name]}), flush=True)
    return {"demo_model": SIZES | {"by_precision": found}}


BENCHMARK = Benchmark("int8_accuracy", __doc__, measure, options=DATA)

if __name__ == "__main__":
    BENCHMARK.main()
