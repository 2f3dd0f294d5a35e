"""Embedding lookup, in a separate table or in the LM head."""

import torch
from torch import Tensor

from nightjar.kernels import cuda, native
from nightjar.kernels.cuda.launch import serves
from nightjar.kernels.operands import HeadTable, LinearWeight, TokenTable


def tied_table(table: Tensor, head: LinearWeight) -> TokenTable:
    """Return the table [V, H] to keep where `head` was packed from it; one copy may serve both."""
    return head.table(table.shape[0]) or table


def embed(
    ids: Tensor,
    positions: Tensor,
    table: TokenTable,
    position_table: Tensor | None,
    prompt_vectors: Tensor | None = None,
    vector_bases: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Compute the residual stream of every packed row: see reference.embedding.embed.

    table: rows of the vocabulary, or the LM head that holds them.
    """
    if isinstance(table, HeadTable):
        if prompt_vectors is None and ids.numel() and int(ids.max()) >= table.vocab_size:
            raise IndexError(f"id {int(ids.max())}: the table has {table.vocab_size} rows")
        ids, table = _own_table(ids, table)
    find = cuda.embedding.embed if serves(table) else native.embedding.embed
    return find(ids, positions, table, position_table, prompt_vectors, vector_bases, scale)


def _own_table(ids: Tensor, table: HeadTable) -> tuple[Tensor, Tensor]:
    """Return a table of only the rows that the ids name, and the ids in that table."""
    count, vocab_size = ids.shape[0], table.vocab_size
    rows = table.rows(ids.clamp(max=vocab_size - 1))
    return torch.where(ids < vocab_size, torch.arange(count), ids - vocab_size + count), rows
