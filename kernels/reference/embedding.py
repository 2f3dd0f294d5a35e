"""Embedding lookup; prompt vectors may replace table rows."""

from torch import Tensor
from torch.nn import functional as F

from nightjar.kernels.reference.widened import widened


def embed(
    ids: Tensor,
    positions: Tensor,
    table: Tensor,
    position_table: Tensor | None,
    prompt_vectors: Tensor | None = None,
    vector_bases: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Compute the residual stream of every packed row: token or prompt vector, plus position.

    ids: int64[T]; an id at or past the vocabulary V reads row `vector_bases[t] + id - V` of
    prompt_vectors.  positions: int64[T].  table: [V, H]; position_table: [P, H], or None for rotary
    embeddings; prompt_vectors: float32[R, H], the rows that this step reads; vector_bases:
    int64[T], the first row of the row's own vectors.  scale multiplies table rows and vectors.
    Returns [T, H], in FP32 at least.
    """
    vocab_size = table.shape[0]
    x = widened(F.embedding(ids.clamp(max=vocab_size - 1), table))
    if prompt_vectors is not None and vector_bases is not None:
        rows = (ids >= vocab_size).nonzero().squeeze(1)
        if rows.numel():
            sources = vector_bases[rows] + ids[rows] - vocab_size
            x[rows] = prompt_vectors.index_select(0, sources).to(x.dtype)
    if scale != 1.0:
        x.mul_(scale)
    return x if position_table is None else x.add_(F.embedding(positions, position_table))
