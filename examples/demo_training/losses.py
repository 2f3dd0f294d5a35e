"""What a batch asks of the model: to rank, or to write."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.demo_training.batches import RankBatch, TextBatch
from examples.demo_training.branches import document_losses, make_branches, mean_by_document
from examples.demo_training.model import Gpt

# Part of the query tokens that are scored, as the output layer takes much of the time.
QUERY_SHARE = 0.2
# Weight of the penalty on saying a token twice.
REPEAT_WEIGHT = 1.0


def rank_loss(model: Gpt, batch: RankBatch, device: torch.device) -> Tensor:
    """Ranking loss plus the language model losses of the right documents and the queries."""
    branches = make_branches(batch.queries, batch.documents, device)
    states = model(branches.tokens, branches.positions, branches.mask)
    losses = document_losses(model, states, branches)
    targets = torch.tensor(batch.targets, device=device)
    logits = -batch.scale * mean_by_document(losses, branches.owner)
    loss = F.cross_entropy(logits, targets)
    if batch.both_ways:
        loss = loss + F.cross_entropy(logits.T, targets)
    if batch.hints is not None:
        loss = loss + hint_loss(model, batch.hints, states, logits)
    right = branches.owner[None] == targets[:, None]
    loss = loss + losses[right].mean()
    at = torch.arange(branches.query_length - 1, device=device)
    scored = at[None] + 1 < branches.lengths[:, None]
    scored &= torch.rand(scored.shape, device=device) < QUERY_SHARE
    if not bool(scored.any()):
        return loss
    targets = branches.tokens[:, 1 : branches.query_length][scored]
    query_states = states[:, : branches.query_length - 1][scored]
    return loss + batch.query_weight * model.losses(query_states, targets).mean()


def text_loss(model: Gpt, batch: TextBatch, device: torch.device) -> Tensor:
    """Weighted mean of the language model loss and of a penalty on saying a token twice.

    A small model tends to repeat what it has just written; the penalty is the unlikelihood,
    -log(1 - p), of the last four tokens (Welleck et al. 2019).
    """
    longest = max(len(row) for row in batch.rows)
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in batch.rows])
    weights = torch.tensor([[*w, *[0.0] * (longest - len(w))] for w in batch.weights])[:, 1:]
    tokens, weights = tokens.to(device), weights.to(device)
    scored = weights > 0
    target = tokens[:, 1:][scored]
    recent = torch.stack([tokens.roll(k, 1)[:, :-1][scored] for k in range(4)], dim=1)
    chances = F.log_softmax(model(tokens)[:, :-1][scored] @ model.wte.weight.T, dim=-1)
    losses = -chances.gather(1, target[:, None])[:, 0]
    again = chances.gather(1, recent).exp().clamp(max=0.99)
    losses = losses - REPEAT_WEIGHT * (torch.log1p(-again) * (recent != target[:, None])).sum(dim=1)
    return (losses * weights[scored]).sum() / weights[scored].sum()


def hint_loss(
    model: Gpt, hints: Sequence[Sequence[float]], states: Tensor, logits: Tensor
) -> Tensor:
    """How far from the teacher are the verdicts and, after each token, the hint head."""
    chances = torch.tensor([row[-1] for row in hints], device=logits.device)
    loss = F.cross_entropy(logits, torch.stack([1 - chances, chances], dim=1))
    index = [(i, t) for i, row in enumerate(hints) for t in range(len(row))]
    rows, columns = torch.tensor(index, device=logits.device).T
    wanted = torch.tensor([chance for row in hints for chance in row], device=logits.device)
    found = model.hint(states[rows, columns])[:, 0]
    return loss + F.binary_cross_entropy_with_logits(found, wanted)
