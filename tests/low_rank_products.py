"""Products of low rank for the tests of the CPU kernels, and what they add in float64."""

from dataclasses import dataclass

import numpy as np
import torch

from nightjar.kernels import AdaptedRows, AdapterProducts, LowRank, Place
from tests.cpu_blocks import normal


@dataclass(frozen=True)
class Factors:
    """One product: where it is added, with its factors [rank, inputs] and [outputs, rank]."""

    place: Place
    down: torch.Tensor
    up: torch.Tensor
    begin: int = 0
    gated: bool = False

    @staticmethod
    def made(place, rank, inputs, outputs, *, begin=0, gated=False, seed=0):
        down = normal(rank, inputs, seed=100 + seed) / inputs**0.5
        up = normal(outputs, rank, seed=200 + seed) / rank**0.5
        return Factors(place, down, up, begin, gated)

    def added(self, x, outputs):
        """What it adds to the rows of a projection: float64[T, outputs]."""
        y = x.new_zeros(x.shape[0], outputs, dtype=torch.float64)
        product = x.double() @ self.down.double().t() @ self.up.double().t()
        y[:, self.begin : self.begin + self.up.shape[0]] = product
        return y


def adapter(*layers):
    """An adapter of these factors, by layer."""
    made = []
    for layer in layers:
        places = dict.fromkeys(Place, ())
        for one in layer:
            product = LowRank.of(one.down, one.up, one.begin, gated=one.gated)
            places[one.place] = (*places[one.place], product)
        made.append(tuple(places.values()))
    return AdapterProducts(tuple(made))


def rows_of(adapters, owners):
    """A step whose rows have these adapters; -1 for none."""
    return AdaptedRows(tuple(adapters), np.array(owners, dtype=np.int64))


def mixed(rows, adapters, seed=0):
    """Owners of so many rows, neighbours now and then of one adapter, and some of none."""
    drawn = torch.randint(-1, adapters, (rows,), generator=torch.Generator().manual_seed(seed))
    owners = drawn.repeat_interleave(3)[:rows] if rows > 20 else drawn
    return owners.tolist()
