"""LoRA adapters (arXiv 2106.09685): their factors, and the rows of a step that each of them adapts.

An adapter adds products of low rank to a layer's projections. Several adapters may be in one step:
their rows are grouped, and each group is multiplied with its own factors. The base model's products
are computed for all rows together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from nightjar import kernels
from nightjar.checkpoints import ModelConfig
from nightjar.kernels import LowRank, RowGroup

QUERY_KEY_VALUE, ATTENTION_OUT = "query_key_value", "attention_out"
FEED_FORWARD = ("gate", "up", "down")

Products = Mapping[str, tuple[LowRank, ...]]
"""A layer's products of low rank, by the projection of the decoder that they are added to."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """One adapter on the model's device.

    layers: the products of each layer of the model.
    salt: 120 bits of a hash of the factors, never 0. Equal adapters share cached prefixes.
    """

    layers: tuple[Products, ...]
    salt: int

    @staticmethod
    def of(factors: Mapping[str, Tensor], config: ModelConfig, device: str) -> LoraAdapter:
        """Copy factors, named as `checkpoints.adapters` does; they must fit the model."""
        layers: list[dict[str, tuple[LowRank, ...]]] = [{} for _ in range(config.n_layers)]
        digest = blake2b(digest_size=15)
        for name in sorted(factors):
            digest.update(f"{name}{list(factors[name].shape)}".encode())
            digest.update(factors[name].float().contiguous().numpy().tobytes())
            root, _, side = name.rpartition(".")
            if side != "down":
                continue
            layer, _, projection = root.partition(".")
            place, begin = _place(projection, config)
            down, up = (factors[f"{root}.{one}"].to(device) for one in ("down", "up"))
            products = layers[int(layer)]
            products[place] = (*products.get(place, ()), LowRank.of(down, up, begin))
        return LoraAdapter(tuple(layers), int.from_bytes(digest.digest(), "little") or 1)


class AdaptedRows:
    """Which of a step's rows have which adapter, grouped by adapter.

    rows: int64[M], the adapted rows, each adapter's after those of the one before it.
    plain: int64[P], the other rows, ascending.
    """

    def __init__(
        self, adapters: Sequence[LoraAdapter], owners: np.ndarray, device: str = "cpu"
    ) -> None:
        """owners: int64[T], the index of each row's adapter; -1 for a row without one."""
        self._adapters = tuple(adapters)
        self._owners = owners
        self._device = device
        order = np.argsort(owners, kind="stable")
        starts = np.searchsorted(owners[order], np.arange(len(adapters) + 1))
        plain = int(starts[0])
        self._starts = (starts - plain).tolist()  # of each adapter's rows among the adapted ones
        self.rows = kernels.upload(torch.from_numpy(order[plain:]), device)
        self.plain = kernels.upload(torch.from_numpy(order[:plain]), device)
        self._places = kernels.upload(torch.arange(self.rows.shape[0]), device)
        self._chosen: dict[tuple[bool, ...], AdaptedRows] = {}

    def to(self, device: str) -> AdaptedRows:
        """Return the same rows on a device."""
        if device == self._device:
            return self
        return AdaptedRows(self._adapters, self._owners, device)

    def within(self, wanted: Tensor) -> AdaptedRows | None:
        """Return what is adapted of these rows int64[N], counted anew; None for nothing."""
        owners = self._owners[wanted.cpu().numpy()]
        if (owners < 0).all():
            return None
        return AdaptedRows(self._adapters, owners, self._device)

    def adapting(self, layer: int, projections: Sequence[str]) -> AdaptedRows | None:
        """Return the rows whose adapters change one of these projections of a layer, if any.

        So what is computed for a row depends on its own adapter only.
        """
        chosen = tuple(
            any(name in adapter.layers[layer] for name in projections) for adapter in self._adapters
        )
        if all(chosen):
            return self
        if chosen not in self._chosen:
            kept = np.flatnonzero(chosen)
            number = np.full(len(chosen) + 1, -1, dtype=np.int64)
            number[kept] = np.arange(kept.size)
            self._chosen[chosen] = AdaptedRows(
                [self._adapters[i] for i in kept], number[self._owners], self._device
            )
        found = self._chosen[chosen]
        return found if found.rows.numel() else None

    def add(self, layer: int, projection: str, y: Tensor, x: Tensor) -> None:
        """Add the adapters' products to a projection's result y [T, out], in place.

        x: [M, in], the inputs of `rows`.
        """
        self._add(layer, projection, y, x, self.rows)

    def add_gathered(self, layer: int, projection: str, y: Tensor, x: Tensor) -> None:
        """Do the same where y [M, out] holds the results of `rows` only."""
        self._add(layer, projection, y, x, self._places)

    def gathered(self, x: Tensor) -> Tensor:
        """Return the adapted rows of x [T, in], in FP32 at least: [M, in]."""
        found = x.index_select(0, self.rows)
        return found.to(torch.promote_types(x.dtype, torch.float32))

    def _add(self, layer: int, projection: str, y: Tensor, x: Tensor, rows: Tensor) -> None:
        groups = [
            RowGroup(self._starts[number], self._starts[number + 1], products)
            for number, adapter in enumerate(self._adapters)
            if (products := adapter.layers[layer].get(projection))
        ]
        if groups:
            kernels.add_low_rank(y, x.to(y.dtype), rows, groups)


def _place(projection: str, config: ModelConfig) -> tuple[str, int]:
    """Return the decoder's projection that holds this one, and its first output there."""
    queries = config.n_heads * config.head_size
    keys = config.n_kv_heads * config.head_size
    begins = {"query": 0, "key": queries, "value": queries + keys}
    if projection in begins:
        return QUERY_KEY_VALUE, begins[projection]
    return projection, 0
