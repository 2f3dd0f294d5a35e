"""How often the model ranks the right document first."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from examples.demo_training import dishes
from examples.demo_training.branches import document_losses, make_branches, mean_by_document
from examples.demo_training.data import VERDICTS, Review, Turn
from examples.demo_training.run import Run


@torch.no_grad()
def scores(
    run: Run, queries: Sequence[Sequence[int]], documents: Sequence[Sequence[int]]
) -> Tensor:
    """Mean negative log-likelihood (queries, documents) of each document after each query."""
    run.model.eval()
    branches = make_branches(queries, documents, run.device)
    states = run.model(branches.tokens, branches.positions, branches.mask)
    losses = document_losses(run.model, states, branches)
    return mean_by_document(losses, branches.owner).cpu()


def review_accuracy(run: Run, reviews: Sequence[Review]) -> float:
    """Share of reviews whose fitting verdict has the lower score."""
    rows = run.codec.encode([review.prompt for review in reviews])
    pairs = sorted(zip(rows, reviews, strict=True), key=lambda pair: len(pair[0]))
    verdicts = run.codec.encode(VERDICTS)
    right = 0
    for start in range(0, len(pairs), 100):
        part = pairs[start : start + 100]
        best = scores(run, [row for row, _ in part], verdicts).argmin(dim=1).tolist()
        right += sum(a == b.verdict for a, (_, b) in zip(best, part, strict=True))
    return right / len(reviews)


def chat_recall(run: Run, turns: Sequence[Turn], draws: int) -> list[float]:
    """For each turn, how often the true answer beats 15 random ones of `turns` by score."""
    answers = list(dict.fromkeys(turn.answer for turn in turns))
    rng = random.Random(0)
    shares: list[float] = []
    for turn in turns:
        others = [answer for answer in answers if answer != turn.answer]
        drawn = [rng.sample(others, 15) for _ in range(draws)]
        names = list(dict.fromkeys([turn.answer, *[name for draw in drawn for name in draw]]))
        documents = run.codec.encode([" " + name for name in names])
        row = scores(run, run.codec.encode([turn.prompt]), documents)[0].tolist()
        score = dict(zip(names, row, strict=True))
        wins = [all(score[turn.answer] < score[name] for name in draw) for draw in drawn]
        shares.append(sum(wins) / draws)
    return shares


def dish_accuracy(run: Run, unseen: bool, count: int = 300) -> float:
    """Share of held-out dish queries whose fitting dish beats three of other cuisines."""
    rng = random.Random(7)
    right = 0
    for _ in range(count):
        query, documents = dishes.make_test(rng, unseen)
        row = scores(run, run.codec.encode([query]), run.codec.encode(documents))[0]
        right += int(row.argmin()) == 0
    return right / count


def mean(values: Sequence[float]) -> float:
    """The mean, 0 of nothing."""
    return sum(values) / len(values) if values else 0.0
