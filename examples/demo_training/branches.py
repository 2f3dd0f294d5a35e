"""How many documents are scored after a query that is computed once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.demo_training.model import Gpt


@dataclass
class Branches:
    """Queries with the same documents as branches after each of them.

    The tokens of a row are the padded query (length Q) and then all documents (length D). A
    document sees its query and itself only, at the positions that follow the query. So each is
    computed as if it stood alone after the query, and the query is computed once.
    """

    tokens: Tensor  # (B, Q + D)
    positions: Tensor  # (B, Q + D)
    mask: Tensor  # (B, 1, Q + D, Q + D)
    source: Tensor  # (B, D): where the state lies that predicts each document token
    owner: Tensor  # (D): the document of each document token
    lengths: Tensor  # (B): query lengths

    @property
    def query_length(self) -> int:
        """Q, the padded length of the queries."""
        return self.tokens.shape[1] - self.owner.shape[0]


def make_branches(
    queries: Sequence[Sequence[int]], documents: Sequence[Sequence[int]], device: torch.device
) -> Branches:
    """Lays queries and documents out as Branches."""
    longest = max(len(query) for query in queries)
    lengths = torch.tensor([len(query) for query in queries])
    owner = torch.tensor([i for i, document in enumerate(documents) for _ in document])
    within = torch.tensor([t for document in documents for t in range(len(document))])
    flat = [token for document in documents for token in document]
    tokens = torch.tensor([[*q, *[0] * (longest - len(q)), *flat] for q in queries])
    at = torch.arange(tokens.shape[1])
    segment = torch.cat([torch.full((longest,), -1), owner])
    causal = at[None, :] <= at[:, None]
    to_query = (at < longest)[None, :] & causal
    to_same = (segment[None, :] == segment[:, None]) & causal
    real = (at[None, :] < lengths[:, None]) | (at >= longest)[None, :]
    allowed = (to_query | to_same)[None] & real[:, None, :]
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))[:, None]
    query_positions = at[:longest].expand(len(queries), -1)
    positions = torch.cat([query_positions, lengths[:, None] + within[None]], dim=1)
    inside = (longest + torch.arange(len(flat)) - 1)[None].expand(len(queries), -1)
    source = torch.where(within[None] == 0, lengths[:, None] - 1, inside)
    moved = [x.to(device) for x in (tokens, positions, mask, source, owner, lengths)]
    return Branches(*moved)


def document_losses(model: Gpt, states: Tensor, branches: Branches) -> Tensor:
    """Negative log-likelihood (B, D) of each document token after its query."""
    index = branches.source[:, :, None].expand(-1, -1, states.shape[2])
    picked = states.gather(1, index).flatten(0, 1)
    targets = branches.tokens[:, branches.query_length :].flatten()
    return model.losses(picked, targets).view(branches.source.shape)


def mean_by_document(losses: Tensor, owner: Tensor) -> Tensor:
    """The endpoint's scores (B, number of documents): means of losses (B, D) by owner (D)."""
    count = int(owner.max()) + 1
    sums = losses.new_zeros(losses.shape[0], count).index_add(1, owner, losses)
    return sums / torch.bincount(owner, minlength=count)
