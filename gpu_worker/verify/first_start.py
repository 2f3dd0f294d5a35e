"""The quick part of a verification, for a model that starts for the first time.

It takes the loaded engine, in its own precision and on its own device. Its work is bounded by the
size of the model: large models get fewer tokens and layers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

import torch

from nightjar.checkpoints import ModelConfig, ModelDirectory
from nightjar.checkpoints.verdicts import Verdict, recall_verdict, remember_verdict
from nightjar.gpu_worker.engine import Engine
from nightjar.gpu_worker.engine.errors import CannotComputeError
from nightjar.gpu_worker.verify.couplings import Coupling, couplings
from nightjar.gpu_worker.verify.losses import (
    CannotScoreError,
    Losses,
    encode_texts,
    shuffled,
    text_loss,
    unigram_loss,
)
from nightjar.gpu_worker.verify.raw_layers import RawLayers
from nightjar.gpu_worker.verify.report import (
    Finding,
    judge_couplings,
    judge_losses,
    verdict_of,
)
from nightjar.gpu_worker.verify.sample_texts import TEXTS

logger = logging.getLogger(__name__)

WORK = 4e11
"""Operations for the texts, about a second or two of a processor: two for a weight and a token."""
FEWEST_TOKENS, MOST_TOKENS = 48, 400
LAYER_WEIGHTS = 48_000_000
"""Weights of the layers whose order is judged; a layer with more is left to `nightjar verify`."""
MOST_LAYERS = 4


def verify_first_start(directory: ModelDirectory, engine: Engine, fingerprint: str) -> None:
    """Verify the model quickly unless an outcome is remembered, and remember the outcome.

    engine: without requests.

    Raises:
        CannotComputeError: The model is damaged; the message says what was found and what to do.
    """
    verdict = recall_verdict(fingerprint)
    if verdict is None:
        verdict = _judge(directory, engine)
        remember_verdict(fingerprint, verdict)
    if not verdict.is_sound:
        raise CannotComputeError(verdict.refusal(directory.path))


def quick_findings(directory: ModelDirectory, engine: Engine) -> list[Finding]:
    """Return what the quick checks find: the loss on text, the order of some layers' weights."""
    return [*_loss(directory, engine), *_order(directory)]


def _judge(directory: ModelDirectory, engine: Engine) -> Verdict:
    started = time.monotonic()
    findings = quick_findings(directory, engine)
    engine.reset_prefix_cache()
    verdict = verdict_of(findings)
    logger.info(
        "first start of this model: verified %s quickly in %.1f s, %s; `nightjar verify` checks "
        "all of it",
        ", ".join(dict.fromkeys(one.check for one in findings)) or "nothing",
        time.monotonic() - started,
        "and it is sound" if verdict.is_sound else "and it is not in order",
        extra={"action": "model_verified", "is_sound": verdict.is_sound},
    )
    return verdict


def _loss(directory: ModelDirectory, engine: Engine) -> list[Finding]:
    weights = sum(math.prod(tensor.shape) for tensor in directory.tensors.values())
    sequences = _few(encode_texts(directory, TEXTS), token_budget(weights))
    if not sequences:
        return []
    try:
        losses = Losses(
            model=text_loss(engine, sequences),
            shuffled=text_loss(engine, shuffled(sequences)),
            unigram=unigram_loss(sequences, directory.config.vocab_size),
            without=(),
            tokens=sum(len(ids) - 1 for ids in sequences),
        )
    except CannotScoreError as error:
        logger.warning("the loss on text cannot be judged at this start: %s", error)
        return []
    return judge_losses(losses)


def token_budget(weights: int) -> int:
    """Return how many tokens of text a model of so many weights is tried on."""
    # Each token is computed twice: in its text, and in a random order.
    return min(MOST_TOKENS, max(FEWEST_TOKENS, int(WORK / (4 * weights))))


def _few(sequences: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Return whole texts while they are short enough together; two at least."""
    found: list[list[int]] = []
    left = list(sequences)
    while left and (len(found) < 2 or sum(map(len, found)) + len(left[0]) <= tokens):
        found.append(left.pop(0))
        left.reverse()  # the first ones are Korean, the last ones English: from both ends in turn
    return found


def _order(directory: ModelDirectory) -> list[Finding]:
    """Judge the order of weights in some layers."""
    count = layer_budget(directory.config)
    if not count:
        return []
    return judge_couplings(_couplings(directory, count))


def layer_budget(config: ModelConfig) -> int:
    """Return in how many layers the order of weights is judged."""
    inner = config.intermediate_size * (3 if config.gated else 2)
    heads = 2 * (config.n_heads + config.n_kv_heads) * config.head_size
    fit = LAYER_WEIGHTS // (config.hidden_size * (inner + heads))
    return min(MOST_LAYERS, config.n_layers, fit)


def _couplings(directory: ModelDirectory, count: int) -> list[Coupling]:
    """Return the couplings of layers that are far apart."""
    config = directory.config
    chosen = {round(n * (config.n_layers - 1) / max(1, count - 1)) for n in range(count)}
    generator = torch.Generator().manual_seed(0)
    layers = RawLayers(directory)
    with torch.inference_mode():
        return [
            one
            for number in sorted(chosen)
            for one in couplings(layers.layer(number), number, config.head_size, generator)
        ]
