"""The operands of the ops: norms, packed weights, layers.

No backend is imported here. A backend packs weights into its own class, which then computes with
them. So a caller need not know the backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from nightjar.kernels.low_rank import Added
from nightjar.kernels.operand import Operand

WeightPrecision = Literal["float", "bfloat16", "int8", "fp8"]
"""How products are computed.

"float": in the weight's dtype.  "bfloat16": of rounded numbers, sums in FP32.  "int8": in bytes.
"fp8": of numbers of 8 bits, with a scale for each channel and row, sums in FP32.
"""

Parts: TypeAlias = tuple[Tensor, Tensor | None]
"""A weight [out, in] and its bias [out]."""


@dataclass(frozen=True, slots=True)
class Wide:
    """What of a product in FP16 may pass 65,504, and so stays in FP32; other precisions ignore it.

    rows: its rows.  results: its results, after the activation too.
    """

    rows: bool = False
    results: bool = False


NARROW = Wide()


@dataclass(frozen=True, eq=False)
class Norm(Operand):
    """A layer norm, or without a bias a root-mean-square norm: weight, bias float32[H]."""

    weight: Tensor
    bias: Tensor | None
    epsilon: float


@dataclass(frozen=True)
class LinearWeight(ABC):
    """A weight [out, in] with its bias, as one backend packed it.

    A gated weight holds two of that shape, and `linear` gives activation(x @ gate) * (x @ up) (GLU
    variants, arXiv 2002.05202).  Methods that take `added` do nothing where the backend cannot add
    products of low rank in its kernels.
    """

    out_features: int

    @property
    @abstractmethod
    def rows_dtype(self) -> torch.dtype:
        """The dtype in which `linear` takes its rows."""

    @abstractmethod
    def linear(self, x: Tensor, activation: str | None, out_dtype: torch.dtype | None) -> Tensor:
        """See kernels.linear."""

    def unactivated(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute `linear` of x without an activation: [T, out]; of a gated weight both products,
        first that of the gate."""
        return (self.linear(x, None, None),)

    def adapted_linear(self, x: Tensor, added: Added) -> Tensor | None:
        """Compute `linear` of x with what adapters add to an attention's output: float32[T, out].

        Returns None, and does nothing, where the backend has no such kernel.
        """
        del x, added
        return None

    def linear_onto(self, residual: Tensor, x: Tensor, added: Added | None = None) -> bool:
        """Add `linear` of x to the residual stream, in place; added: to an attention's output.

        Returns False, and does nothing, where the backend has no such kernel.
        """
        del residual, x, added
        return False

    def normed_linear(
        self,
        residual: Tensor,
        delta: Tensor | None,
        norm: Norm,
        activation: str | None,
        out_dtype: torch.dtype,
        added: Added | None = None,
    ) -> Tensor | None:
        """Normalise the residual stream and multiply it in one call.

        added: to queries, keys and values.  Returns None, and does nothing, where the backend has
        no such kernel.
        """
        del residual, delta, norm, activation, out_dtype, added
        return None

    def feed_forward(
        self,
        residual: Tensor,
        delta: Tensor | None,
        norm: Norm,
        down: LinearWeight,
        activation: str,
        added: Added | None = None,
    ) -> Tensor | None:
        """Compute a feed-forward block of this weight and `down` in one call, or return None."""
        del residual, delta, norm, down, activation, added
        return None

    def feed_forward_onto(
        self,
        residual: Tensor,
        delta: Tensor | None,
        norm: Norm,
        down: LinearWeight,
        activation: str,
        added: Added | None = None,
    ) -> bool:
        """Add `feed_forward` to the residual stream, in place, or return False."""
        del residual, delta, norm, down, activation, added
        return False

    def table(self, vocab_size: int) -> HeadTable | None:
        """Return the weight as an embedding table of so many rows, if it can be read by row."""
        del vocab_size
        return None

    @property
    def prefetched(self) -> tuple[Tensor, ...]:
        """The data that a GPU prefetches before this weight is used."""
        return ()

    def followed_by(self, after: LinearWeight) -> LinearWeight:
        """Return the weight with the weights that a decode step reads after it."""
        del after
        return self


class HeadTable(ABC):
    """An LM head that serves as the embedding table [V, H]."""

    vocab_size: int

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of ids int64[T], each below the vocabulary: float32[T, H]."""


TokenTable: TypeAlias = Tensor | HeadTable
"""Rows of a vocabulary: [V, H]."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block: attention (qkv packed as query, key, value) and feed-forward.

    up: gated where the model's blocks are; query and key norm, post norms: None where the model has
    none.
    """

    attention_norm: Norm
    qkv: LinearWeight
    query_norm: Norm | None
    key_norm: Norm | None
    attention_out: LinearWeight
    attention_post_norm: Norm | None
    mlp_norm: Norm
    up: LinearWeight
    down: LinearWeight
    mlp_post_norm: Norm | None


@dataclass(frozen=True, eq=False)
class Layers(Operand):
    """Layers that add first their attention and then their feed-forward block to the stream.

    scales: each layer's factor of its attention scores; activation: of the feed-forward blocks.
    """

    weights: tuple[LayerWeights, ...]
    scales: tuple[float, ...]
    activation: str
