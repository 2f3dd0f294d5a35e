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
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import has_bf16, versions
from benchmarks.peers.nightjar_peer import run_all, scores_of
from benchmarks.real_run import CANDIDATES, STOP, VERDICTS, candidates
from benchmarks.writing import RESULTS, today, write_json
from examples.demo_training.data import Data, load_data
from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import (
    Engine,
    EngineConfig,
    GenerateRequest,
    GenerateResult,
    RankRequest,
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
    for number, (query, documents) in enumerate(workload.rankings, start=len(requests)):
        requests.append(RankRequest(number, query, documents))
    found = Answers([], [])
    for result in run_all(Engine(model, token_bytes, EngineConfig()), requests):
        if isinstance(result, GenerateResult):
            found.texts.append(result.token_ids)
        else:
            found.scores.append(scores_of(result))
    return found


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


def by_precision(
    directory: ModelDirectory, workload: Workload, also: Callable[[Decoder, int], dict[str, float]]
) -> dict[str, dict[str, float]]:
    """Each precision held against fp32.

    also: what else a model and its share of the work give.
    """
    token_bytes = directory.tokenizer().token_bytes
    figures: dict[str, dict[str, float]] = {}
    exact: Answers | None = None
    for name, model in precisions(directory):
        part = share_of(name)
        found = answer(model, token_bytes, workload.part(part))
        exact = exact or found
        figures[name] = agreement(found, exact) | also(model, part)
        print(json.dumps({name: figures[name]}), flush=True)
    return figures


def demo_figures(path: Path, data: Data) -> dict[str, dict[str, float]]:
    """The trained model on rows kept out of its training."""
    directory, rng = ModelDirectory.open(path), random.Random(5)
    tokenizer = directory.tokenizer()
    turns, reviews = data.chat_heldout[:PROMPTS], data.reviews_heldout[:REVIEWS]
    prompts, rankings = [tokenizer.encode(turn.prompt) for turn in turns], []
    for turn, prompt in zip(turns[:RANKINGS], prompts, strict=False):
        texts = candidates(turn, data.chat_heldout, rng)
        rankings.append((prompt, [tokenizer.encode(f" {text}") for text in texts]))
    sampling = SamplingParams(MAX_TOKENS, stop=(STOP.encode(),))
    verdicts = [tokenizer.encode(verdict) for verdict in VERDICTS]
    judged = [(tokenizer.encode(review.prompt), verdicts) for review in reviews]

    def of_reviews(model: Decoder, part: int) -> dict[str, float]:
        asked = Workload([], judged, sampling).part(part)
        scores = answer(model, tokenizer.token_bytes, asked).scores
        hits = [best(row) == one.verdict for row, one in zip(scores, reviews, strict=False)]
        return {"review_accuracy": share(hits), "reviews": len(scores)}

    return by_precision(directory, Workload(prompts, rankings, sampling), of_reviews)


def random_figures(path: Path, seed: int = 0) -> dict[str, dict[str, float]]:
    """GPT-2-small's blocks with random weights: prompts and documents of random tokens."""
    save_gpt2(path, replace(SMALL, vocab_size=32_000), seed)
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(300, 32_000) for _ in range(rng.randint(low, high))]

    prompts, rankings = [tokens(8, 100) for _ in range(RANDOM_PROMPTS)], []
    for _ in range(RANDOM_RANKINGS):
        rankings.append((tokens(20, 100), [tokens(6, 14) for _ in range(RANDOM_DOCUMENTS)]))
    workload = Workload(prompts, rankings, SamplingParams(RANDOM_TOKENS, ignore_eos=True))
    return by_precision(ModelDirectory.open(path), workload, lambda *_: {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("examples/demo_model"))
    args = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)  # now, not after hours of computing
    data, date = load_data(args.data), today()
    demo = {"prompts": PROMPTS, "rankings": RANKINGS, "documents": CANDIDATES, "reviews": REVIEWS}
    drawn = {"prompts": RANDOM_PROMPTS, "rankings": RANDOM_RANKINGS, "documents": RANDOM_DOCUMENTS}
    figures: dict[str, Any] = {
        "date": date,
        "command": "python -m benchmarks.int8_accuracy --data DIR",
        "versions": versions(),
        "demo_model": demo | {"by_precision": demo_figures(args.model, data)},
    }
    with tempfile.TemporaryDirectory() as folder:
        found = random_figures(Path(folder))
    figures["gpt2_small_shape_random"] = drawn | {"by_precision": found}
    write_json(RESULTS / f"int8-accuracy-{date}.json", figures)


if __name__ == "__main__":
    main()
