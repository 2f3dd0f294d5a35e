"""What the demo model answers, ranks and judges: shared by the studies of accuracy.

The rows were kept out of the model's training.
"""

import random
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks.answers import answers, scores_of
from benchmarks.real_run import CANDIDATES, candidates
from examples.demo_training.data import STOP, VERDICTS, Review, Turn, load_data
from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import Engine, EngineConfig, GenerateResult
from nightjar.gpu_worker.models import Decoder
from nightjar.requests import GenerateRequest, RankRequest, Request, SamplingParams

SIZES = {"prompts": 200, "rankings": 100, "documents": CANDIDATES, "reviews": 3000}
MAX_TOKENS = 48

Ranked = list[tuple[list[int], list[list[int]]]]
"""Queries with their documents, all as token ids."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a model is asked, and the rows that it comes from."""

    turns: Sequence[Turn]
    reviews: Sequence[Review]
    prompts: list[list[int]]
    rankings: Ranked
    judged: Ranked


@dataclass(frozen=True, slots=True)
class Answers:
    """What one model made of the work: token ids, and the documents' mean NLLs."""

    texts: list[list[int]]
    scores: list[list[float]]


def work_of(args: Namespace, directory: ModelDirectory) -> Work:
    """The held-out rows of `args.data` as token ids of the model."""
    data, tokenizer, rng = load_data(args.data), directory.tokenizer(), random.Random(5)
    turns, reviews = data.chat_heldout[: SIZES["prompts"]], data.reviews_heldout[: SIZES["reviews"]]
    prompts, rankings = [tokenizer.encode(turn.prompt) for turn in turns], []
    for turn, prompt in zip(turns[: SIZES["rankings"]], prompts, strict=False):
        texts = candidates(turn, data.chat_heldout, rng)
        rankings.append((prompt, [tokenizer.encode(f" {text}") for text in texts]))
    verdicts = [tokenizer.encode(verdict) for verdict in VERDICTS]
    judged = [(tokenizer.encode(review.prompt), verdicts) for review in reviews]
    return Work(turns, reviews, prompts, rankings, judged)


def answer(
    model: Decoder,
    token_bytes: Sequence[bytes],
    prompts: list[list[int]],
    rankings: Ranked,
    config: EngineConfig,
) -> Answers:
    """The prompts are continued greedily, the documents are ranked."""
    sampling = SamplingParams(MAX_TOKENS, stop=(STOP.encode(),))
    asked: list[Request] = [GenerateRequest(n, ids, sampling) for n, ids in enumerate(prompts)]
    asked += [RankRequest(n, *given) for n, given in enumerate(rankings, start=len(asked))]
    results = answers(Engine(model, token_bytes, config), asked)
    texts = [one.token_ids for one in results if isinstance(one, GenerateResult)]
    return Answers(texts, [scores_of(one) for one in results[len(texts) :]])


def best(scores: Sequence[float]) -> int:
    """The index of the document that wins."""
    return min(range(len(scores)), key=scores.__getitem__)


def order(scores: Sequence[float]) -> list[int]:
    """The documents from the first to the last."""
    return sorted(range(len(scores)), key=scores.__getitem__)


def share(hits: Sequence[bool]) -> float:
    """How many of them hold."""
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
        "equal_orders": share([order(a) == order(b) for a, b in rankings]),
        "texts": len(texts),
        "rankings": len(rankings),
    }


def judged_rightly(
    model: Decoder, token_bytes: Sequence[bytes], work: Work, config: EngineConfig
) -> dict[str, float]:
    """The share of reviews whose verdict is the more likely one."""
    scores = answer(model, token_bytes, [], work.judged, config).scores
    hits = [best(row) == one.verdict for row, one in zip(scores, work.reviews, strict=True)]
    return {"review_accuracy": share(hits), "reviews": len(scores)}
