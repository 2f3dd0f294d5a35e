"""Embedding lookup, in a table of its own or in the LM head."""

import torch
from torch import Tensor

from nightjar.kernels import cuda, native
from nightjar.kernels.cuda.launch import serves
from nightjar.kernels.operands import HeadTable, LinearWeight, TokenTable


def tied_table(table: Tensor, head: LinearWeight) -> TokenTable:
    """What to keep as the table [V, H] where `head` was packed from it, or from all of it but rows
    of zeros at its end: one copy, if that serves both."""
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
    """Residual stream of every packed row: see reference.embedding.embed.

    table: rows of the vocabulary, or the LM head in their place.
    """
    if isinstance(table, HeadTable):
        if prompt_vectors is None and ids.numel() and int(ids.max()) >= table.vocab_size:
            raise IndexError(f"id {int(ids.max())}: the table has {table.vocab_size} rows")
        ids, table = _own_table(ids, table)
    find = cuda.embedding.embed if serves(table) else native.embedding.embed
    return find(ids, positions, table, position_table, prompt_vectors, vector_bases, scale)


def _own_table(ids: Tensor, table: HeadTable) -> tuple[Tensor, Tensor]:
    """The rows that the ids name as a table of their own, one a row, and the ids in that."""
    count, vocab_size = ids.shape[0], table.vocab_size
    rows = table.rows(ids.clamp(max=vocab_size - 1))
    return torch.where(ids < vocab_size, torch.arange(count), ids - vocab_size + count), rows
