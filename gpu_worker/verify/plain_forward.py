"""One text through a decoder, with the logits and hidden states of every position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nightjar import kernels
from nightjar.gpu_worker.models import Decoder
from nightjar.gpu_worker.models.batch import KVTensors, TokenBatch
from nightjar.kernels import Added, LayerWeights, Rotation, StepRows

BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class PlainForward:
    """logits: float32[T, V].  hidden_states: float32[layers + 1, T, H], the input of each layer,
    then the output of the last norm."""

    logits: Tensor
    hidden_states: Tensor


@torch.inference_mode()
def plain_forward(decoder: Decoder, ids: Sequence[int]) -> PlainForward:
    """Compute one text, of at least one token, with a whole decoder on the CPU."""
    noting = _NotingDecoder(decoder)
    cache = noting.allocate_cache(-(-len(ids) // BLOCK_SIZE), BLOCK_SIZE)
    hidden = noting.forward(batch_of_text(ids), cache)
    return PlainForward(noting.logits(hidden), torch.stack([*noting.inputs, hidden.float()]))


def batch_of_text(ids: Sequence[int]) -> TokenBatch:
    """Return one text as the input of a forward pass that fills the first blocks of a cache."""
    blocks = list(range(-(-len(ids) // BLOCK_SIZE)))
    positions = torch.arange(len(ids))
    return TokenBatch(
        token_ids=torch.tensor(list(ids)),
        positions=positions,
        vector_bases=torch.zeros(len(ids), dtype=torch.int64),
        prompt_vectors=None,
        write_blocks=positions // BLOCK_SIZE,
        write_offsets=positions % BLOCK_SIZE,
        prefill=kernels.ChunkLayout.build([kernels.Chunk(blocks, 0, len(ids))], BLOCK_SIZE),
        decode=None,
        branch=None,
        output_rows=None,
    )


class _NotingDecoder(Decoder):
    """A decoder that notes the residual stream before each layer."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(
            decoder.config, decoder.weights, decoder.dtype, decoder.cache_dtype, decoder.device
        )
        self.inputs: list[Tensor] = []

    def _run_at_once(
        self,
        residual: Tensor,
        rotation: Rotation | None,
        batch: TokenBatch,
        rows: StepRows,
        cache: KVTensors,
    ) -> int:
        """Run no layer in one call: the stream is noted between them."""
        return 0

    def _attention_out(
        self, residual: Tensor, x: Tensor, layer: LayerWeights, added: Added | None
    ) -> Tensor | None:
        self.inputs.append(residual.float().clone())
        return super()._attention_out(residual, x, layer, added)
