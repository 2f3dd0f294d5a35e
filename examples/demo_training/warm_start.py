"""From which token vectors the model starts: cheap to find, and they rank above chance."""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.demo_training import dishes
from examples.demo_training.batches import chat_groups, dish_groups, review_batches
from examples.demo_training.config import Config
from examples.demo_training.data import VERDICTS, Data
from examples.demo_training.tokens import Codec


def related_vectors(data: Data, codec: Codec, config: Config) -> Tensor:
    """First token vectors (vocabulary, width) from which tokens share texts.

    The singular vectors of the positive pointwise mutual information of tokens within a chat
    pair, a review with its verdict or a line about dishes.  Tokens of like use start near each
    other, which saves the short training much of the time it would need to find that out.
    """
    rng = random.Random(3)
    texts = [f"{turn.prompt} {turn.answer}" for turn in data.chat] * 3
    texts += [review.prompt + VERDICTS[review.verdict] for review in data.reviews]
    texts += [dishes.make_fact(rng) for _ in range(5000)]
    size = config.vocab_size
    together = torch.zeros(size * size)
    for start in range(0, len(texts), 2000):
        pairs: list[Tensor] = []
        for row in codec.encode(texts[start : start + 2000]):
            found = torch.tensor(sorted(set(row)))
            pairs.append((found[:, None] * size + found[None, :]).flatten())
        index = torch.cat(pairs)
        together.index_add_(0, index, torch.ones(len(index)))
    counts = together.view(size, size).fill_diagonal_(0)
    # The power evens out rare contexts, as in word2vec's negative samples.
    context = counts.sum(dim=0).clamp(min=1) ** 0.75
    expected = counts.sum(dim=1).clamp(min=1)[:, None] * (context / context.sum())[None, :]
    information = torch.log((counts / expected).clamp(min=1.0))
    left, values, _ = torch.svd_lowrank(information, q=config.width, niter=3)
    return left * values.sqrt()


def flatten(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """All tokens (N) of the rows one after the other, and the row (N) that each belongs to."""
    tokens = torch.tensor([token for row in rows for token in row])
    return tokens, torch.tensor([index for index, row in enumerate(rows) for _ in row])


def bag_scores(
    table: Tensor, queries: Sequence[Sequence[int]], documents: Sequence[Sequence[int]]
) -> Tensor:
    """Scores (queries, documents), higher is better, of a model without layers or order.

    A query is the mean of its token vectors in table (vocabulary, width), and a document's
    score the mean of the tied output's logits of its tokens.
    """
    width = table.shape[1]
    tokens, owner = flatten(queries)
    vectors = F.layer_norm(F.embedding(tokens, table), (width,))
    vectors = vectors * (torch.rand(len(tokens), 1) > 0.2)  # against overfitting
    sums = torch.zeros(len(queries), width).index_add(0, owner, vectors)
    states = F.layer_norm(sums, (width,))
    tokens, owner = flatten(documents)
    sums = torch.zeros(len(documents), width).index_add(0, owner, F.embedding(tokens, table))
    return states @ (sums / torch.bincount(owner)[:, None]).T


def warm_up(
    embedding: nn.Embedding, data: Data, labels: list[Tensor], codec: Codec, config: Config
) -> None:
    """Trains token vectors to rank as a bag of tokens: cheap, no layers."""
    steps = config.bag_steps
    optimizer = torch.optim.AdamW(
        embedding.parameters(), lr=1.5e-3, betas=(0.9, 0.98), weight_decay=0.02
    )
    wide = replace(config, chat_group=192, review_tokens=6000)
    reviews = review_batches(data, labels, codec, wide, 5)
    chat = chat_groups(data, codec, wide, 5)
    food = dish_groups(codec, 5)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1.5e-3 * (1 - step / steps)
        loss = torch.zeros(())
        for batch in (next(reviews), next(chat), next(food)):
            logits = 2 * bag_scores(embedding.weight, batch.queries, batch.documents)
            targets = torch.tensor(batch.targets)
            loss = loss + F.cross_entropy(logits, targets)
            if batch.both_ways:
                loss = loss + F.cross_entropy(logits.T, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"bag of tokens, step {step}: loss {float(loss.detach()):.3f}", flush=True)
