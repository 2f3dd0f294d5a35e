"""What int8 and bf16 cost in accuracy: their texts, scores and rankings beside fp32's.

    python -m benchmarks.int8_accuracy --data DIR [--model examples/demo_model]

DIR holds `chatbot/train.csv` and `nsmc/train.tsv` (examples/demo_model/README.md names them). The
demo model answers and ranks rows kept out of its training. bf16 does one part in SLOW_SHARE of the
work where the processor only emulates it. Writes
`benchmarks/results/int8-accuracy-<date>.json`.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import mean

import torch

from benchmarks.machine import describe, has_bf16
from benchmarks.peers.nightjar_peer import run_all, scores_of
from benchmarks.real_run import CANDIDATES, candidates
from benchmarks.writing import RESULTS, begun, parser, write_json
from examples.demo_training.data import STOP, VERDICTS, Data, load_data
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

PROMPTS = 200
RANKINGS = 100
REVIEWS = 3000
MAX_TOKENS = 48
SLOW_SHARE = 5
"""One in so many prompts, rankings and reviews."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts to continue greedily, and (query, documents) to rank, all as token ids."""

    prompts: list[list[int]]
    rankings: list[tuple[list[int], list[list[int]]]]
    sampling: SamplingParams

    def part(self, share: int) -> "Workload":
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
    # Tokens that both texts of a pair begin with.
    alike = sum(
        1 for a, b in texts for _ in takewhile(lambda ab: ab[0] == ab[1], zip(a, b, strict=False))
    )
    return {
        "equal_texts": share([a == b for a, b in texts]),
        "equal_first_tokens": share([a[:1] == b[:1] for a, b in texts]),
        "tokens_until_different": round(alike / sum(len(b) for _, b in texts), 4),
        "mean_abs_delta_nll": round(mean(deltas), 5),
        "max_abs_delta_nll": round(max(deltas), 5),
        "mean_nll": round(mean(a for a, _ in pairs), 5),
        "equal_winners": share([best(a) == best(b) for a, b in rankings]),
        "texts": len(texts),
        "rankings": len(rankings),
    }


def figures(directory: ModelDirectory, data: Data) -> dict[str, dict[str, float]]:
    """Each precision held against fp32, on rows kept out of the model's training."""
    tokenizer, rng = directory.tokenizer(), random.Random(5)
    turns, reviews = data.chat_heldout[:PROMPTS], data.reviews_heldout[:REVIEWS]
    prompts, rankings = [tokenizer.encode(turn.prompt) for turn in turns], []
    for turn, prompt in zip(turns[:RANKINGS], prompts, strict=False):
        texts = candidates(turn, data.chat_heldout, rng)
        rankings.append((prompt, [tokenizer.encode(f" {text}") for text in texts]))
    sampling = SamplingParams(MAX_TOKENS, stop=(STOP.encode(),))
    verdicts = [tokenizer.encode(verdict) for verdict in VERDICTS]
    judged = [(tokenizer.encode(review.prompt), verdicts) for review in reviews]
    asked, of_reviews = Workload(prompts, rankings, sampling), Workload([], judged, sampling)
    found: dict[str, dict[str, float]] = {}
    exact: Answers | None = None
    for name in ("fp32", "bf16", "int8"):
        model, part = load_model(directory, name), share_of(name)
        given = answer(model, tokenizer.token_bytes, asked.part(part))
        exact = exact or given
        scores = answer(model, tokenizer.token_bytes, of_reviews.part(part)).scores
        hits = [best(row) == one.verdict for row, one in zip(scores, reviews, strict=False)]
        found[name] = agreement(given, exact)
        found[name] |= {"review_accuracy": share(hits), "reviews": len(scores)}
        print(json.dumps({name: found[name]}), flush=True)
    return found


def main() -> None:
    arguments = parser("benchmarks.int8_accuracy", __doc__)
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--model", type=Path, default=Path("examples/demo_model"))
    args = arguments.parse_args()
    sizes = {"prompts": PROMPTS, "rankings": RANKINGS, "documents": CANDIDATES, "reviews": REVIEWS}
    result = begun("benchmarks.int8_accuracy") | {"machine": describe(torch.get_num_threads())}
    by_precision = figures(ModelDirectory.open(args.model), load_data(args.data))
    path = args.out or RESULTS / f"int8-accuracy-{result['date']}.json"
    write_json(path, result | {"demo_model": sizes | {"by_precision": by_precision}})


if __name__ == "__main__":
    main()
