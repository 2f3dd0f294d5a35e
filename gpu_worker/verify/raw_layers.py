"""One layer's matrices as they are stored, in one layout for all families, in FP32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nightjar.checkpoints import ModelDirectory
from nightjar.checkpoints.weights import TENSOR_NAMES
from nightjar.gpu_worker.models.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class RawLayer:
    """The matrices of a layer, as [out, in].

    query [Hq * D, H], key and value [Hkv * D, H], attention_out [H, Hq * D].
    gate and up [I, H], gate None without one; down [H, I].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attention_out: Tensor
    gate: Tensor | None
    up: Tensor
    down: Tensor


class RawLayers:
    """Reads layers one after the other, so that memory holds one."""

    def __init__(self, directory: ModelDirectory) -> None:
        self._config = directory.config
        self._names = TENSOR_NAMES[directory.config.family]
        self._reader = WeightReader(directory)

    def __iter__(self) -> Iterator[RawLayer]:
        return map(self.layer, range(self._config.n_layers))

    def layer(self, number: int) -> RawLayer:
        """Read one layer."""
        return self._layer(f"{self._names.layer}.{number}.")

    def vector(self, name: str) -> Tensor:
        """Read a tensor by its common name in FP32."""
        return self._reader.tensor(name, torch.float32, "cpu")

    @property
    def tokens(self) -> Tensor:
        """The embedding table [V, H]."""
        return self.vector(f"{self._names.tokens}.weight")

    @property
    def positions(self) -> Tensor | None:
        """The learned positions [P, H]; None where positions are rotations."""
        if self._config.rope is not None:
            return None
        return self.vector(f"{self._names.positions}.weight")

    def _matrix(self, name: str) -> Tensor:
        weight = self.vector(f"{name}.weight")
        return weight.t() if self._names.input_major else weight

    def _layer(self, root: str) -> RawLayer:
        names = self._names
        query, key, value = self._query_key_value(root)
        inner = [self._matrix(root + name) for name in names.mlp_in]
        return RawLayer(
            query=query,
            key=key,
            value=value,
            attention_out=self._matrix(root + names.attention_out),
            gate=inner[0] if len(inner) == 2 else None,
            up=inner[-1],
            down=self._matrix(root + names.mlp_out),
        )

    def _query_key_value(self, root: str) -> tuple[Tensor, Tensor, Tensor]:
        config, names = self._config, self._names.query_key_value
        if len(names) == 3:
            query, key, value = (self._matrix(root + name) for name in names)
            return query, key, value
        fused = self._matrix(root + names[0])
        if self._names.interleaved:
            by_head = fused.view(config.n_heads, 3, config.head_size, -1)
            query, key, value = (by_head[:, part].flatten(0, 1) for part in range(3))
        else:
            query, key, value = fused.chunk(3)
        return query, key, value
