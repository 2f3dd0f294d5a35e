"""Which batches of rows a step of the training gets."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.demo_training import dishes
from examples.demo_training.config import Config
from examples.demo_training.data import REVIEW_HEAD, VERDICTS, Data, Turn
from examples.demo_training.tokens import Codec


@dataclass
class RankBatch:
    """Queries, documents and the index of each query's right document."""

    queries: list[list[int]]
    documents: list[list[int]]
    targets: list[int]
    scale: float  # how many logits one nat of the score is worth
    query_weight: float  # weight of the language model loss on the query
    both_ways: bool = False  # also ask which query fits the document
    # The teacher's chance of the second document after each token of each query.
    hints: list[list[float]] | None = None


@dataclass
class TextBatch:
    """Token rows and the weight of each token as a target; the first has none."""

    rows: list[list[int]]
    weights: list[list[float]]


Batch = RankBatch | TextBatch


def batch_tokens(batch: Batch) -> int:
    """Real tokens that a batch runs through the model."""
    if isinstance(batch, TextBatch):
        return sum(len(row) for row in batch.rows)
    branches = len(batch.queries) * sum(len(document) for document in batch.documents)
    return sum(len(query) for query in batch.queries) + branches


def review_batches(
    data: Data, labels: list[Tensor], codec: Codec, config: Config, seed: int
) -> Iterator[RankBatch]:
    """Reviews of similar length together, both verdicts as documents, without end."""
    rng = random.Random(seed)
    verdicts = codec.encode(VERDICTS)
    while True:
        order = rng.sample(range(len(data.reviews)), len(data.reviews))
        for start in range(0, len(order), 4000):
            rows: list[tuple[list[int], list[float], int]] = []
            part = order[start : start + 4000]
            encoded = codec.encode_with_ends([data.reviews[i].prompt for i in part])
            for i, (tokens, ends) in zip(part, encoded, strict=True):
                read = (torch.tensor(ends) - len(REVIEW_HEAD)).clamp(0, len(labels[i]) - 1)
                rows.append((tokens, labels[i][read].tolist(), data.reviews[i].verdict))
            rows.sort(key=lambda row: len(row[0]))
            batches: list[list[tuple[list[int], list[float], int]]] = [[]]
            for row in rows:
                if (len(batches[-1]) + 1) * (len(row[0]) + 2) > config.review_tokens:
                    batches.append([])
                batches[-1].append(row)
            rng.shuffle(batches)
            for batch in batches:
                queries, hints, targets = (list(column) for column in zip(*batch, strict=True))
                yield RankBatch(queries, verdicts, targets, 1.0, 0.3, hints=hints)


def chat_groups(data: Data, codec: Codec, config: Config, seed: int) -> Iterator[RankBatch]:
    """Questions with the answers of the whole group as documents, without end."""
    rng = random.Random(seed)
    while True:
        group: dict[str, Turn] = {}
        for turn in rng.sample(data.chat, len(data.chat)):
            group.setdefault(turn.answer, turn)  # no answer twice in a group
            if len(group) == config.chat_group:
                queries = codec.encode([turn.prompt for turn in group.values()], varied=True)
                answers = codec.encode([" " + answer for answer in group])
                yield RankBatch(queries, answers, list(range(len(group))), 2.0, 0.1, True)
                group = {}


def dish_groups(codec: Codec, seed: int) -> Iterator[RankBatch]:
    """Queries about cuisines with one dish of each cuisine as documents, without end."""
    rng = random.Random(seed)
    while True:
        queries, documents, targets = dishes.make_group(rng, per_cuisine=3)
        yield RankBatch(codec.encode(queries), codec.encode(documents), targets, 3.0, 0.1)


def chat_packs(data: Data, codec: Codec, config: Config, seed: int) -> Iterator[TextBatch]:
    """Rows of 1 to 4 turns, a few of them filled to the last position, without end."""
    rng = random.Random(seed)
    while True:
        rows: list[list[int]] = []
        weights: list[list[float]] = []
        filled = rng.random() < 0.05
        for _ in range(4 if filled else config.pack_rows):
            row, weight = make_document(data, codec, rng, 40 if filled else rng.randint(1, 4))
            rows.append(row[: config.positions])
            weights.append(weight[: config.positions])
        yield TextBatch(rows, weights)


def make_document(
    data: Data, codec: Codec, rng: random.Random, turns: int
) -> tuple[list[int], list[float]]:
    """Token ids and target weights of a document: turns of chat, now and then another text."""
    kind = rng.random()
    if turns == 1 and kind < 0.25:
        review = rng.choice(data.reviews)
        pieces = [(review.prompt, 0.3), (VERDICTS[review.verdict] + "\n", 1.0)]
    elif turns == 1 and kind < 0.4:
        pieces = [(dishes.make_fact(rng) + "\n", 1.0)]
    else:
        pieces = []
        for _ in range(turns):
            about_food = rng.random() < 0.08
            turn = Turn(*dishes.make_turn(rng)) if about_food else rng.choice(data.chat)
            # The line end and the next speaker weigh as the answer: there the stop begins.
            pieces += [("사용자:", 1.0), (f" {turn.question}\n클로바:", 0.3)]
            pieces += [(f" {turn.answer}", 1.0), ("\n", 1.0)]
    encoded = codec.encode([text for text, _ in pieces])
    row = [token for tokens in encoded for token in tokens]
    paired = zip(encoded, pieces, strict=True)
    weight = [value for tokens, (_, value) in paired for _ in tokens]
    return [*row, codec.end], [*weight, 1.0]
