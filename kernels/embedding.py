"""Embedding lookup, by whichever backend serves the table."""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from nightjar.kernels import cuda_ops, native, reference
from nightjar.kernels.cuda.launch import serves
from nightjar.kernels.linear import LinearWeight
from nightjar.kernels.native.float_linear import FloatPanelWeight


@dataclass(frozen=True, slots=True)
class HeadTable:
    """An LM head that serves as the table [V, H]; rows past its own are zeros."""

    head: FloatPanelWeight
    vocab_size: int


TokenTable: TypeAlias = Tensor | HeadTable
"""Rows of a vocabulary: [V, H]."""


def tied_table(table: Tensor, head: LinearWeight) -> TokenTable:
    """What to keep as the table [V, H] where `head` was packed from it, or from all of it but rows
    of zeros at its end: one copy, if that serves both."""
    return HeadTable(head, table.shape[0]) if isinstance(head, FloatPanelWeight) else table


def embed(
    ids: Tensor,
    positions: Tensor,
    table: TokenTable,
    position_table: Tensor | None,
    prompt_vectors: Tensor | None = None,
    vector_bases: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Residual stream of every packed row: token or prompt vector, plus position.

    ids: int64[T]; an id at or past the vocabulary V reads row `vector_bases[t] + id - V` of
    prompt_vectors.  positions: int64[T].  table: [V, H]; position_table: [P, H], or None
    where positions enter elsewhere; prompt_vectors: [R, H]; vector_bases: int64[T], the first row
    of the row's own vectors.  scale multiplies table rows and prompt vectors alike.
    Returns [T, H], in FP32 at least.
    """
    if isinstance(table, HeadTable):
        if prompt_vectors is None and ids.numel() and int(ids.max()) >= table.vocab_size:
            raise IndexError(f"id {int(ids.max())}: the table has {table.vocab_size} rows")
        ids, table = _own_table(ids, table)
    tables = table, position_table
    if serves(table):
        vectors = None if prompt_vectors is None else prompt_vectors.to(torch.float32)
        return cuda_ops.embed(ids, positions, *tables, vectors, vector_bases, scale)
    if prompt_vectors is None and native.embedding.serves(*tables):
        return native.embedding.embed(ids, positions, *tables, scale)
    return reference.embedding.embed(ids, positions, *tables, prompt_vectors, vector_bases, scale)


def _own_table(ids: Tensor, table: HeadTable) -> tuple[Tensor, Tensor]:
    """The rows that the ids name as a table of their own, one a row, and the ids in that."""
    count, vocab_size = ids.shape[0], table.vocab_size
    rows = native.float_linear.rows(table.head, ids.clamp(max=vocab_size - 1))
    return torch.where(ids < vocab_size, torch.arange(count), ids - vocab_size + count), rows
