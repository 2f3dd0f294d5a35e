"""Which batches of rows a step of the training gets."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from examples.demo_training import dishes
from examples.demo_training.config import Config
from examples.demo_training.data import VERDICTS, Data, Review, Turn
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


def review_batches(data: Data, codec: Codec, config: Config, seed: int) -> Iterator[RankBatch]:
    """Reviews of similar length together, both verdicts as documents, without end."""
    rng = random.Random(seed)
    verdicts = codec.encode(VERDICTS)
    while True:
        reviews = rng.sample(data.reviews, len(data.reviews))
        for start in range(0, len(reviews), 4000):
            part = reviews[start : start + 4000]
            rows = codec.encode([review.prompt for review in part], varied=True)
            pairs = sorted(zip(rows, part, strict=True), key=lambda pair: len(pair[0]))
            batches: list[list[tuple[list[int], Review]]] = [[]]
            for pair in pairs:
                if (len(batches[-1]) + 1) * (len(pair[0]) + 2) > config.review_tokens:
                    batches.append([])
                batches[-1].append(pair)
            rng.shuffle(batches)
            for batch in batches:
                targets = [review.verdict for _, review in batch]
                yield RankBatch([row for row, _ in batch], verdicts, targets, 1.0, 0.3)


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
