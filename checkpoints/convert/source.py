"""What every source of weights gives: a shape, and its tensors by their common names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nightjar.checkpoints.convert.arrays import StoredArray
from nightjar.checkpoints.convert.projections import RowOrder
from nightjar.checkpoints.convert.shape import SourceShape
from nightjar.checkpoints.errors import CheckpointError

# Tensors that each rank has a part of, by the dimension that is cut: 0 rows, 1 columns.  The rest
# is the same on each rank.
CUT = {
    "tokens.weight": 0,
    "head.weight": 0,
    "qkv.weight": 0,
    "qkv.bias": 0,
    "mlp_in.weight": 0,
    "mlp_in.bias": 0,
    "attention_out.weight": 1,
    "mlp_out.weight": 1,
}


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that is to be converted.

    description: for people, such as "Megatron-LM, version 3.0, 8 x 1 shards".
    tensors: common name -> the array of each rank, [out, in] where it is a matrix.
    row_order: of the fused projections.
    gate_within_ranks: each rank has its part of the gate, then its part of the other projection.
    equal: arrays that must equal a named tensor, such as the last stage's embeddings.
    files: everything that was read, for the manifest.
    adds_one: norms keep their weights less one.
    vocab_multiple: the embedding table is padded to a multiple of so many rows; None if unknown.
    """

    description: str
    shape: SourceShape
    tensors: Mapping[str, tuple[StoredArray, ...]]
    row_order: RowOrder
    gate_within_ranks: bool
    equal: Mapping[str, tuple[StoredArray, ...]]
    files: tuple[Path, ...]
    adds_one: bool = False
    vocab_multiple: int | None = None

    def parts(self, name: str) -> tuple[StoredArray, ...]:
        """Return a tensor's parts, one a rank.

        Raises:
            CheckpointError: The checkpoint has no such tensor.
        """
        found = self.tensors.get(name)
        if found is None:
            raise CheckpointError(
                f"{self.files[0].parent}: the checkpoint has no tensor for {name}, which its "
                "arguments ask for"
            )
        return found


def cut_dimension(name: str) -> int | None:
    """Return the dimension in which a tensor is cut into shards, or None."""
    for ending, dimension in CUT.items():
        if name == ending or name.endswith(f".{ending}"):
            return dimension
    return None
