"""The shape of a decoder of any family; `families.py` reads it from config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nightjar.checkpoints.rope import RopeConfig

NormKind = Literal["layer_norm", "rms_norm"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder: all differences between families except the names of tensors.

    vocab_size: rows of the embedding table.  context_length: positions at which the model works as
    it was trained; a sliding window that is narrower than the positions bounds it.
    head_size: channels of one attention head; n_heads * head_size need not be hidden_size.
    gated: the feed-forward block is activation(gate) * up rather than activation(up).
    parallel_residual: attention and feed-forward read the same residual stream.
    qk_norm: queries and keys are normalised, head by head, before the rotation.
    post_norms: a block's result is normalised before it is added to the residual stream.
    rope: the rotary embedding, or None where positions are a learned table.
    attention_scales: the factor on each layer's attention scores.
    embedding_, residual_, logits_multiplier: factors on the embeddings (prompt vectors as well),
    on what each block adds to the residual stream, and on the scores over the vocabulary.
    """

    family: str
    vocab_size: int
    context_length: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    intermediate_size: int
    norm: NormKind
    norm_epsilon: float
    activation: str
    tied_embeddings: bool
    attention_scales: tuple[float, ...]
    eos_token_ids: tuple[int, ...]
    rope: RopeConfig | None = None
    gated: bool = False
    parallel_residual: bool = False
    qkv_bias: bool = True
    attention_out_bias: bool = True
    mlp_bias: bool = True
    qk_norm: bool = False
    post_norms: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
