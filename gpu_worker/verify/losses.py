"""What a model makes of plain text: its loss, and what each layer contributes to it."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import (
    Engine,
    EngineConfig,
    RankRequest,
    RankResult,
    RequestFailed,
)
from nightjar.gpu_worker.models import Decoder

CACHE_BYTES = 256 << 20
MAX_TOKENS = 512
"""A text is cut after so many tokens."""


class CannotScoreError(Exception):
    """The engine refused a text, for example because its cache is too small."""


@dataclass(frozen=True, slots=True)
class Losses:
    """Mean negative log-likelihoods of a token, in nats.

    model: of the model.  shuffled: of the model, on the same tokens in a random order.
    unigram: of a model that knows only how often each token comes in the other texts.
    without: of the model without each layer.  tokens: how many were counted.
    """

    model: float
    shuffled: float
    unigram: float
    without: tuple[float, ...]
    tokens: int

    @property
    def harmful(self) -> tuple[int, ...]:
        """The layers without which the model would be better."""
        return tuple(i for i, loss in enumerate(self.without) if loss < self.model - 0.01)


def encode_texts(directory: ModelDirectory, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of the texts that have two or more, after the model's first tokens."""
    tokenizer = directory.tokenizer()
    most = min(MAX_TOKENS, directory.config.context_length)
    made = [[*tokenizer.prefix_ids, *ids] for ids in tokenizer.encode_batch(texts)]
    return [ids[:most] for ids in made if len(ids) > 1]


def measure_losses(directory: ModelDirectory, decoder: Decoder, texts: Sequence[str]) -> Losses:
    """Compute the losses of a whole model (not a shard) on the CPU.

    Raises:
        ValueError: No text has two tokens.
    """
    sequences = encode_texts(directory, texts)
    if not sequences:
        raise ValueError("the sample has no text of two tokens or more")
    token_bytes = directory.tokenizer().token_bytes
    layers = range(directory.config.n_layers)
    without = (
        [_loss(_without(decoder, layer), token_bytes, sequences) for layer in layers]
        if len(layers) > 1
        else []
    )
    return Losses(
        model=_loss(decoder, token_bytes, sequences),
        shuffled=_loss(decoder, token_bytes, shuffled(sequences)),
        unigram=unigram_loss(sequences, directory.config.vocab_size),
        without=tuple(without),
        tokens=sum(len(ids) - 1 for ids in sequences),
    )


def _loss(decoder: Decoder, token_bytes: list[bytes], sequences: Sequence[list[int]]) -> float:
    config = EngineConfig(kv_cache_bytes=CACHE_BYTES)
    return text_loss(Engine(decoder, token_bytes, config), sequences)


def text_loss(engine: Engine, sequences: Sequence[list[int]]) -> float:
    """Score each text after its first token, by an engine without requests: the mean of all tokens.

    It is infinite where scores are not finite.

    Raises:
        CannotScoreError: The engine refuses a text.
    """
    for number, ids in enumerate(sequences):
        engine.submit(RankRequest(number, ids[:1], [ids[1:]]))
    total, open_requests = 0.0, len(sequences)
    while open_requests:
        for result in engine.step():
            open_requests -= 1
            if isinstance(result, RequestFailed):
                if result.code != "not_finite":
                    raise CannotScoreError(result.message)
                total = math.inf
            elif isinstance(result, RankResult) and (mean := result.mean_nll[0]) is not None:
                total += mean * (len(sequences[result.request_id]) - 1)
    return total / sum(len(ids) - 1 for ids in sequences)


def _without(decoder: Decoder, layer: int) -> Decoder:
    """Return the decoder without one layer: its weights are shared."""
    weights, scales = decoder.weights, decoder.config.attention_scales
    config = replace(
        decoder.config,
        n_layers=decoder.config.n_layers - 1,
        attention_scales=scales[:layer] + scales[layer + 1 :],
    )
    kept = replace(weights, layers=weights.layers[:layer] + weights.layers[layer + 1 :])
    return Decoder(config, kept, decoder.dtype, decoder.cache_dtype, decoder.device)


def shuffled(sequences: Sequence[list[int]]) -> list[list[int]]:
    """Return each text with its tokens after the first in a random order."""
    generator = random.Random(0)
    return [[ids[0], *generator.sample(ids[1:], len(ids) - 1)] for ids in sequences]


def unigram_loss(sequences: Sequence[list[int]], vocab_size: int) -> float:
    """Return the loss of counting tokens: each text by the counts of the others, plus one."""
    counts = Counter(token for ids in sequences for token in ids[1:])
    total, loss = counts.total(), 0.0
    for ids in sequences:
        own = Counter(ids[1:])
        others = total - own.total() + vocab_size
        loss -= sum(n * math.log((counts[token] - n + 1) / others) for token, n in own.items())
    return loss / total
