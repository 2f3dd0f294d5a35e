"""Statistics of weights that tell sound layers from layers whose rows or columns are mixed up.

Two matrices of a layer that meet along an inner axis have learned to belong together: channel c of
queries and keys, channel c of the values and column c of the output projection, neuron i before and
after its activation.  Two statistics show it, for each head or block of neurons:

- The norm of the product A^T B is larger than with B's rows in a random order.  Only a random
  sketch of A enters: its norm is that of A^T B up to a factor (Johnson and Lindenstrauss).
- The norms of A's and B's rows are correlated.

Where heads, rows or shards were mixed up, neither holds: the stored order is as good as any.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nightjar.gpu_worker.verify.raw_layers import RawLayer

SKETCH_ROWS = 48
ORDERS = 12
"""Random orders that the stored one is compared with."""
LEAST_Z = 3.0
"""Standard deviations above chance, from which a stored order is no accident."""


@dataclass(frozen=True, slots=True)
class Coupling:
    """How much better two matrices fit in the stored order than in random orders.

    layer: its number.  pair: which matrices, such as "query-key".
    z: for each head or block of neurons, the larger statistic, in standard deviations above chance.
    """

    layer: int
    pair: str
    z: tuple[float, ...]

    @property
    def loose(self) -> tuple[int, ...]:
        """The heads or blocks whose order may be chance."""
        return tuple(i for i, z in enumerate(self.z) if z < LEAST_Z)


def couplings(
    layer: RawLayer, number: int, head_size: int, generator: torch.Generator
) -> list[Coupling]:
    """Return the couplings of one layer."""
    made = []
    for pair, first, second, block in _pairs(layer, head_size):
        z = torch.maximum(
            _product(first, second, block, generator), _row_norms(first, second, block)
        )
        made.append(Coupling(number, pair, tuple(z.tolist())))
    return made


def _pairs(layer: RawLayer, head_size: int) -> Iterator[tuple[str, Tensor, Tensor, int]]:
    """Yield pairs of matrices whose rows are the inner axis, and the rows of a block."""
    group = layer.query.shape[0] // layer.key.shape[0]
    keys = _repeated(layer.key, head_size, group)
    values = _repeated(layer.value, head_size, group)
    yield "query-key", layer.query, keys, head_size
    yield "value-output", values, layer.attention_out.t(), head_size
    neurons = _block_of(layer.up.shape[0])
    yield "up-down", layer.up, layer.down.t(), neurons
    if layer.gate is not None:
        yield "gate-down", layer.gate, layer.down.t(), neurons
    # What writes to the residual stream and what reads from it agree on its channels.
    hidden = layer.up.shape[1]
    yield "attention-stream", layer.attention_out, layer.up.t(), hidden
    yield "feed-forward-stream", layer.down, layer.up.t(), hidden
    yield "attention-inputs", layer.query.t(), layer.up.t(), hidden


def _block_of(inner: int) -> int:
    """Return the size of a block, of which there are up to 16."""
    return next(inner // blocks for blocks in (16, 12, 8, 6, 4, 3, 2, 1) if inner % blocks == 0)


def _repeated(rows: Tensor, head_size: int, group: int) -> Tensor:
    """Repeat each head for the query heads that read it."""
    if group == 1:
        return rows
    return rows.view(-1, head_size, rows.shape[1]).repeat_interleave(group, dim=0).flatten(0, 1)


def _product(first: Tensor, second: Tensor, block: int, generator: torch.Generator) -> Tensor:
    """Return how far the product of each block is above that of random orders."""
    rows = first.shape[0]
    sketch = torch.randn(first.shape[1], SKETCH_ROWS, generator=generator)
    sketched = (first @ sketch).view(rows // block, block, SKETCH_ROWS).transpose(1, 2)

    def norms(other: Tensor) -> Tensor:
        products: Tensor = torch.bmm(sketched, other.view(rows // block, block, -1))
        found: Tensor = torch.linalg.vector_norm(products, dim=(1, 2))
        return found

    second = second.contiguous()
    others = torch.stack(
        [norms(second[torch.randperm(rows, generator=generator)]) for _ in range(ORDERS)]
    )
    mean, spread = others.mean(0), others.std(0)
    z: Tensor = (norms(second) - mean) / torch.maximum(spread, 1e-6 * mean).clamp_min(1e-30)
    return z


def _row_norms(first: Tensor, second: Tensor, block: int) -> Tensor:
    """Return the correlation of the rows' norms in each block, times the root of its rows."""
    norms = [rows.norm(dim=1).clamp_min(1e-30).log().view(-1, block) for rows in (first, second)]
    ours, theirs = (part - part.mean(1, keepdim=True) for part in norms)
    scale = (ours.norm(dim=1) * theirs.norm(dim=1)).clamp_min(1e-30)
    correlation: Tensor = (ours * theirs).sum(1) / scale
    return correlation * math.sqrt(block - 1)


def smoothness(positions: Tensor) -> float:
    """Return the mean cosine of neighbouring positions less that of random pairs.

    Learned positions change slowly; in a table whose rows are in another order they do not.
    """
    table = torch.nn.functional.normalize(positions[positions.norm(dim=1) > 0], dim=1)
    half = table.shape[0] // 2
    near = (table[1:] * table[:-1]).sum(1).mean()
    far = (table[:half] * table[half : 2 * half]).sum(1).mean()
    return float(near - far)
