"""A logistic regression on character n-grams, whose judgement of the reviews the model learns."""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.demo_training.data import Review

LONGEST = 4  # characters of an n-gram
FOLDS = 5
PENALTY = 3e-6  # on the squared weights


def ngrams(text: str) -> list[tuple[str, int]]:
    """Each n-gram of the text, with where it first ends."""
    found: dict[str, int] = {}
    for end in range(1, len(text) + 1):
        for start in range(max(0, end - LONGEST), end):
            found.setdefault(text[start:end], end)
    return list(found.items())


def fit(by_row: Tensor, by_gram: Tensor, verdicts: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and bias of the regression on the chosen rows.

    by_row (N, n-grams) and by_gram (n-grams, N) hold the same features; verdicts (N), chosen (N).
    """
    weights = torch.zeros(by_row.shape[1])
    bias = torch.zeros(())
    optimizer = torch.optim.LBFGS(
        [weights, bias], max_iter=30, history_size=10, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        # The gradient is written out: autograd would turn the sparse matrix at every step.
        logits = by_row @ weights + bias
        errors = (torch.sigmoid(logits) - verdicts) * chosen / chosen.sum()
        weights.grad = by_gram @ errors + 2 * PENALTY * weights
        bias.grad = errors.sum()
        loss = F.binary_cross_entropy_with_logits(logits[chosen], verdicts[chosen])
        return loss + PENALTY * weights.square().sum()

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return weights, bias


def prefix_labels(reviews: Sequence[Review]) -> list[Tensor]:
    """For each review, the chance (length + 1) that it is bad, read up to each character.

    Cross-fitted: each review is labelled by a regression fitted to the other folds, so that
    the labels know no more than they would of a new review.
    """
    found = [ngrams(review.text) for review in reviews]
    counts = Counter(gram for grams in found for gram, _ in grams)
    index = {gram: i for i, gram in enumerate(gram for gram in counts if counts[gram] > 1)}
    rows = [[(index[gram], end) for gram, end in grams if gram in index] for grams in found]
    lengths = torch.tensor([len(row) for row in rows])
    flat = torch.tensor([gram for row in rows for gram, _ in row])
    owner = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    # Weighted by rarity and scaled to length 1 (TF-IDF).
    rarity = 1 + torch.log(len(rows) / torch.tensor([counts[gram] for gram in index]))
    norms = torch.zeros(len(rows)).index_add(0, owner, rarity[flat] ** 2).sqrt()
    features = torch.sparse_coo_tensor(
        torch.stack([owner, flat]), rarity[flat] / norms[owner], (len(rows), len(index))
    ).coalesce()
    by_row, by_gram = features.to_sparse_csr(), features.t().to_sparse_csr()
    verdicts = torch.tensor([float(review.verdict) for review in reviews])
    fold = torch.arange(len(rows)) % FOLDS
    labels: list[Tensor] = [torch.empty(0)] * len(rows)
    for number in range(FOLDS):
        weights, bias = fit(by_row, by_gram, verdicts, fold != number)
        for i in range(number, len(rows), FOLDS):
            grams = torch.tensor([gram for gram, _ in rows[i]], dtype=torch.long)
            ends = torch.tensor([end for _, end in rows[i]], dtype=torch.long)
            places = torch.zeros(2, len(reviews[i].text) + 1)
            places[0].index_add_(0, ends, rarity[grams] * weights[grams])
            places[1].index_add_(0, ends, rarity[grams] ** 2)
            evidence, squares = places.cumsum(dim=1)
            labels[i] = torch.sigmoid(evidence / squares.sqrt().clamp(min=1e-6) + bias)
    return labels
