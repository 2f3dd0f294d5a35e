"""What a batch asks of the model: to rank, or to write."""

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.demo_training.batches import RankBatch, TextBatch
from examples.demo_training.branches import document_losses, make_branches, mean_by_document
from examples.demo_training.model import Gpt


def rank_loss(model: Gpt, batch: RankBatch, device: torch.device, query_share: float) -> Tensor:
    """Ranking loss plus the language model losses of the right documents and the queries."""
    branches = make_branches(batch.queries, batch.documents, device)
    states = model(branches.tokens, branches.positions, branches.mask)
    losses = document_losses(model, states, branches)
    targets = torch.tensor(batch.targets, device=device)
    logits = -batch.scale * mean_by_document(losses, branches.owner)
    loss = F.cross_entropy(logits, targets)
    if batch.both_ways:
        loss = loss + F.cross_entropy(logits.T, targets)
    right = branches.owner[None] == targets[:, None]
    loss = loss + losses[right].mean()
    at = torch.arange(branches.query_length - 1, device=device)
    scored = at[None] + 1 < branches.lengths[:, None]
    # Scoring a part of the query saves much of the output layer's time.
    scored &= torch.rand(scored.shape, device=device) < query_share
    if not bool(scored.any()):
        return loss
    targets = branches.tokens[:, 1 : branches.query_length][scored]
    query_states = states[:, : branches.query_length - 1][scored]
    return loss + batch.query_weight * model.losses(query_states, targets).mean()


def text_loss(model: Gpt, batch: TextBatch, device: torch.device) -> Tensor:
    """Weighted mean of the language model loss and of a penalty on saying a token twice.

    Started as an average of the text, the model tends to repeat what it has just read; the penalty
    (unlikelihood, -log(1 - p), of the last four tokens) takes that away sooner than likelihood.
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
    losses = losses - 4.0 * (torch.log1p(-again) * (recent != target[:, None])).sum(dim=1)
    return (losses * weights[scored]).sum() / weights[scored].sum()
