"""Embedding lookup, by whichever backend serves the table."""

import torch
from torch import Tensor

from nightjar.kernels import cuda_ops, reference
from nightjar.kernels.cuda.launch import serves


def embed(
    ids: Tensor,
    positions: Tensor,
    table: Tensor,
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
    tables = table, position_table
    if serves(table):
        vectors = None if prompt_vectors is None else prompt_vectors.to(torch.float32)
        return cuda_ops.embed(ids, positions, *tables, vectors, vector_bases, scale)
    return reference.embedding.embed(ids, positions, *tables, prompt_vectors, vector_bases, scale)
