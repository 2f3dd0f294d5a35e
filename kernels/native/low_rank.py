"""The adapted rows of a step as the compiled products take them."""

from __future__ import annotations

import ctypes

import numpy as np

from nightjar.kernels.low_rank import AdaptedRows, AdapterProducts, Added, LowRank, Place
from nightjar.kernels.native.pointers import INT, POINTER, address, is_plain

Argument = tuple[int | None, int]
"""The address of AdaptedRows in low_rank.h, or None, and a layer."""


def argument(added: Added | None, rows: int, shapes: dict[Place, tuple[int, int]]) -> Argument:
    """Return what adapters add in a call, as its function takes it; the caller must keep `added`.

    shapes: inputs and outputs of the projections, as they must be.

    Raises:
        ValueError: The rows or the products do not fit the call.
    """
    if added is None:
        return None, 0
    told = added.rows.plan(_ToldRows)
    if not 0 <= added.layer < told.needs.shape[1]:
        raise ValueError(f"layer {added.layer} of {told.needs.shape[1]}")
    told.check(rows, told.needs[:, added.layer, [*shapes]], np.array([*shapes.values()]))
    return told.address, added.layer


def step_argument(adapted: AdaptedRows | None, rows: int, shapes: np.ndarray) -> int | None:
    """Return the adapted rows as the compiled layers take them; the caller must keep `adapted`.

    shapes: int64[layers, 4, 2], inputs and outputs of every layer's projections.

    Raises:
        ValueError: The rows or the products do not fit the layers.
    """
    if adapted is None:
        return None
    told = adapted.plan(_ToldRows)
    if told.needs.shape[1] != shapes.shape[0]:
        raise ValueError(f"adapters of {told.needs.shape[1]} layers for {shapes.shape[0]}")
    told.check(rows, told.needs, shapes)
    return told.address


class _LowRankArgument(ctypes.Structure):
    """A product as low_rank.h takes it."""

    _fields_ = (
        *((name, POINTER) for name in ("down", "up")),
        *((name, INT) for name in ("inputs", "ranks", "rank", "first_block", "blocks")),
        *((name, INT) for name in ("gated", "place")),
    )


class _AdaptedRowsArgument(ctypes.Structure):
    """Rows as low_rank.h takes them."""

    _fields_ = (
        *((name, POINTER) for name in ("owners", "rows", "starts")),
        ("adapters", INT),
        ("factors", POINTER),
        *((name, INT) for name in ("layers", "ranks")),
    )


class _ToldRows:
    """The rows of a step as low_rank.h takes them, with what its pointers point at.

    needs: int64[adapters, layers, 4, 2], as those of products.
    """

    def __init__(self, adapted: AdaptedRows) -> None:
        products = [adapter.plan(_ToldProducts) for adapter in adapted.adapters]
        self._rows = adapted.owners.shape[0]
        self.needs = np.stack([told.needs for told in products])
        arrays = adapted.owners, adapted.order, adapted.starts
        owners, order, starts = (np.ascontiguousarray(x, dtype=np.int64) for x in arrays)
        if owners.ndim != 1 or (owners.size and int(owners.max()) >= len(products)):
            raise ValueError(f"rows of {len(products)} adapters, owners {owners.shape}")
        factors = np.concatenate([told.factors for told in products])
        self._held = products, owners, order, starts, factors
        self._told = _AdaptedRowsArgument(
            *(address(x) for x in (owners, order, starts)),
            len(products),
            address(factors),
            self.needs.shape[1],
            max(told.ranks for told in products),
        )
        self.address = ctypes.addressof(self._told)

    def check(self, rows: int, needs: np.ndarray, shapes: np.ndarray) -> None:
        """Raise ValueError unless rows and needs [adapters, ..., 2] fit projections [..., 2]."""
        if rows != self._rows:
            raise ValueError(f"{rows} rows in the step, {self._rows} with or without adapters")
        inputs, outputs = needs[..., 0], needs[..., 1]
        fit = (inputs == 0) | (inputs == shapes[..., 0]) & (outputs <= shapes[..., 1])
        if not fit.all():
            raise ValueError(f"products of {needs.tolist()}, projections of {shapes.tolist()}")


class _ToldProducts:
    """The products of an adapter.

    factors: int64[layers, 4, 2], LowRanks of low_rank.h by layer and place; needs: int64[layers, 4,
    2], their inputs and the last output that they change; ranks: the most numbers that are kept
    of a row.
    """

    def __init__(self, adapter: AdapterProducts) -> None:
        layers = len(adapter.layers)
        self.factors = np.zeros((layers, len(Place), 2), dtype=np.int64)
        self.needs = np.zeros((layers, len(Place), 2), dtype=np.int64)
        self.ranks = 0
        self._held: list[ctypes.Array[_LowRankArgument]] = []
        for layer, every in enumerate(adapter.layers):
            for place, products in enumerate(every):
                if not products:
                    continue
                told = (_LowRankArgument * len(products))()
                kept = 0
                for number, product in enumerate(products):
                    told[number] = _argument(product, kept)
                    kept += product.down.shape[1]
                self._held.append(told)
                self.factors[layer, place] = ctypes.addressof(told), len(products)
                self.needs[layer, place] = _needs(products)
                self.ranks = max(self.ranks, kept)


def _needs(products: tuple[LowRank, ...]) -> tuple[int, int]:
    """Return the inputs of products at one place, and the last block's first output and one."""
    inputs = {product.down.shape[0] for product in products}
    if len(inputs) != 1:
        raise ValueError(f"products of {inputs} inputs at one place")
    blocks = (
        product.begin + (product.up.shape[1] - 1) * product.up.shape[2] for product in products
    )
    return inputs.pop(), 1 + max(blocks)


def _argument(product: LowRank, place: int) -> _LowRankArgument:
    """Return the product as the kernels take it; place: of its numbers among those of a row."""
    down, up = product.down, product.up.transpose(0, 1)
    if not all(is_plain(one) and one.is_contiguous() for one in (down, up)):
        raise ValueError(f"factors of {down.dtype} and {up.dtype}: float32 on a CPU, by block")
    blocks, rank, block = up.shape
    inputs, ranks = down.shape
    if product.begin % block or ranks < rank:
        raise ValueError(f"outputs from {product.begin} on; rank {rank} of {ranks}")
    first = product.begin // block
    return _LowRankArgument(
        down.data_ptr(), up.data_ptr(), inputs, ranks, rank, first, blocks, product.gated, place
    )
