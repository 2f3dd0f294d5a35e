"""How often a precision gives what fp32 gives: first tokens, whole texts, scores, orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
from nightjar.gpu_worker.models import Decoder
from nightjar.gpu_worker.verify.losses import CACHE_BYTES, encode_texts

ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Answers:
    """What one precision made of the sample; None where its scores were not finite.

    texts: the greedy tokens after the first half of each text.
    scores: the mean NLL of the second half of each text after its first half.
    """

    texts: tuple[tuple[int, ...] | None, ...]
    scores: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The shares of the sample in which a precision agrees with fp32, and its scores' distance.

    not_finite: requests whose scores overflowed.  They are computed in a higher precision when the
    model is served.
    """

    precision: str
    first_tokens: float
    texts: float
    order_of_scores: float
    score_distance: float
    not_finite: int


def answers(directory: ModelDirectory, decoder: Decoder, texts: Sequence[str]) -> Answers:
    """Continue and score each text of the sample."""
    sequences = encode_texts(directory, texts)
    sampling = SamplingParams(ANSWER_TOKENS, ignore_eos=True)
    requests: list[Request] = []
    for number, ids in enumerate(sequences):
        half = len(ids) // 2
        requests.append(GenerateRequest(2 * number, ids[:half], sampling))
        requests.append(RankRequest(2 * number + 1, ids[:half], [ids[half:]]))
    engine = Engine(
        decoder, directory.tokenizer().token_bytes, EngineConfig(kv_cache_bytes=CACHE_BYTES)
    )
    for request in requests:
        engine.submit(request)
    generated: dict[int, tuple[int, ...]] = {}
    scored: dict[int, float | None] = {}
    ended = 0
    while ended < len(requests):
        for result in engine.step():
            ended += 1
            if isinstance(result, GenerateResult):
                generated[result.request_id // 2] = tuple(result.token_ids)
            elif isinstance(result, RankResult):
                scored[result.request_id // 2] = result.mean_nll[0]
    numbers = range(len(sequences))
    return Answers(tuple(map(generated.get, numbers)), tuple(map(scored.get, numbers)))


def agreement(precision: str, exact: Answers, found: Answers) -> Agreement:
    """Compare a precision's answers with those of fp32."""
    texts = [
        (ours, theirs)
        for ours, theirs in zip(exact.texts, found.texts, strict=True)
        if ours is not None and theirs is not None
    ]
    scores = [
        (ours, theirs)
        for ours, theirs in zip(exact.scores, found.scores, strict=True)
        if ours is not None and theirs is not None
    ]
    same_order = [(a[0] < b[0]) == (a[1] < b[1]) for a, b in pairwise(sorted(scores))]
    return Agreement(
        precision=precision,
        first_tokens=_share([ours[:1] == theirs[:1] for ours, theirs in texts]),
        texts=_share([ours == theirs for ours, theirs in texts]),
        order_of_scores=_share(same_order),
        score_distance=max((abs(ours - theirs) for ours, theirs in scores), default=0.0),
        not_finite=len(found.texts) - len(texts) + len(found.scores) - len(scores),
    )


def _share(agrees: Sequence[bool]) -> float:
    return sum(agrees) / len(agrees) if agrees else 0.0
