"""Embedding lookup with prompt vectors: see embedding.cu.

Bytes of T rows of H columns, tables of s bytes: T * H * (s + s for a position table + 4).  Two
operations an element: bound by memory and, at few rows, by the launch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.checks import ceil_div, check, check_storage, wide_elements
from nightjar.kernels.cuda.kernel import STORAGE, Kernel
from nightjar.kernels.cuda.launch import launch

THREADS = 128
"""Threads of a block.  With 4 columns a thread, a row of 2048 is 4 blocks, so that one row of
decode uses several multiprocessors."""


def embed(
    ids: Tensor,
    positions: Tensor,
    table: Tensor,
    position_table: Tensor | None,
    prompt_vectors: Tensor | None = None,
    vector_bases: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """As reference.embedding.embed -> float32[T, H]; a row that reads outside its table is NaN."""
    rows, columns = ids.shape[0], table.shape[-1]
    check_storage("table", table)
    check("table", table, table.dtype, (None, None))
    check("ids", ids, torch.int64, (None,), like=table)
    check("positions", positions, torch.int64, (rows,), like=table)
    if position_table is not None:
        check("position_table", position_table, table.dtype, (None, columns), like=table)
    if prompt_vectors is not None:
        if vector_bases is None:
            raise ValueError("prompt_vectors need vector_bases: the first row of each row's own")
        check("prompt_vectors", prompt_vectors, torch.float32, (None, columns), like=table)
        check("vector_bases", vector_bases, torch.int64, (rows,), like=table)
    out = torch.empty(rows, columns, dtype=torch.float32, device=table.device)
    # 4: a float32 load of 16 bytes; wider ones would only split the stores.
    width = min(4, wide_elements(columns, table, position_table, prompt_vectors, out))
    launch(
        Kernel.of("embedding", "embed", table.dtype, width),
        (rows, ceil_div(columns, THREADS * width)),
        (THREADS,),
        ids,
        positions,
        table,
        position_table,
        prompt_vectors,
        vector_bases if prompt_vectors is not None else None,
        out,
        np.int64(table.shape[0]),
        np.int64(1 if position_table is None else position_table.shape[0]),
        np.int64(0 if prompt_vectors is None else prompt_vectors.shape[0]),
        np.int32(columns),
        np.float32(scale),
    )
    return out


def specialisations() -> Iterator[Kernel]:
    """Yield every instance that the engine uses."""
    for storage in STORAGE:
        for width in (4, 1):
            yield Kernel.of("embedding", "embed", storage, width)
