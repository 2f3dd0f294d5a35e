"""The shape of a decoder that is converted, and what it is called in Hugging Face's terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from nightjar.checkpoints.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class SourceShape:
    """What a training framework's arguments say of a decoder.

    vocab_rows: rows of the embedding table, with padding.
    rotary_share: share of a head that is rotated; None where positions are a learned table.
    rotary_pairs: neighbours rotate together, in place of the halves of a head.
    gated: the feed-forward block has a gate, and its activation is SiLU.
    extra: keys of config.json that scale the rotary embedding.
    """

    vocab_rows: int
    context_length: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    intermediate_size: int
    norm: Literal["LayerNorm", "RMSNorm"]
    norm_epsilon: float
    activation: str
    gated: bool
    tied: bool
    linear_bias: bool
    qkv_bias: bool
    qk_norm: bool
    rotary_share: float | None
    rotary_base: float
    rotary_pairs: bool
    extra: dict[str, Any]


def family_of(shape: SourceShape) -> str:
    """Return the family that computes such a decoder.

    Raises:
        CheckpointError: None of the families that Nightjar serves does.
    """
    if shape.rotary_share is None:
        return _must("gpt2", _gpt2_obstacles(shape))
    if shape.norm == "LayerNorm":
        return _must("gpt_neox", _neox_obstacles(shape))
    return _must("llama", _llama_obstacles(shape)) if not shape.qk_norm else _qwen3(shape)


def _qwen3(shape: SourceShape) -> str:
    obstacles = _llama_obstacles(shape)
    if shape.linear_bias:
        obstacles.append("biases (disable_bias_linear is off)")
    return _must("qwen3", obstacles)


def _must(family: str, obstacles: list[str]) -> str:
    if obstacles:
        raise CheckpointError(
            f"this decoder has {' and '.join(obstacles)}, which no served family has together "
            f"with its other parts (the nearest is {family}); it cannot be converted"
        )
    return family


def _gpt2_obstacles(shape: SourceShape) -> list[str]:
    found = []
    if shape.norm != "LayerNorm":
        found.append("RMS norms with learned positions")
    if shape.gated:
        found.append("a gated feed-forward block with learned positions")
    found += _common_obstacles(shape)
    return found


def _neox_obstacles(shape: SourceShape) -> list[str]:
    found = ["a gated feed-forward block with layer norms"] if shape.gated else []
    return found + _common_obstacles(shape)


def _common_obstacles(shape: SourceShape) -> list[str]:
    found = []
    if shape.n_kv_heads != shape.n_heads:
        found.append("grouped queries with layer norms")
    if not (shape.linear_bias and shape.qkv_bias):
        found.append("layer norms without biases of its projections")
    if shape.qk_norm:
        found.append("norms of queries and keys")
    if shape.head_size * shape.n_heads != shape.hidden_size:
        found.append("heads of a size of their own")
    return found


def _llama_obstacles(shape: SourceShape) -> list[str]:
    found = []
    if not shape.gated:
        found.append("RMS norms without a gated feed-forward block")
    if shape.rotary_share != 1.0:
        found.append("RMS norms and heads that are rotated in part")
    if shape.qkv_bias and not shape.linear_bias and shape.qk_norm:
        found.append("biases of queries and keys that are normalised")
    return found


def config_json(shape: SourceShape, vocab_size: int, dtype: str) -> dict[str, Any]:
    """Return config.json of the converted model; vocab_size is that of the tokenizer."""
    family = family_of(shape)
    shared = {"vocab_size": vocab_size, "tie_word_embeddings": shape.tied, "torch_dtype": dtype}
    if family == "gpt2":
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_positions": shape.context_length,
            "n_embd": shape.hidden_size,
            "n_layer": shape.n_layers,
            "n_head": shape.n_heads,
            "n_inner": shape.intermediate_size,
            "activation_function": shape.activation,
            "layer_norm_epsilon": shape.norm_epsilon,
            **shared,
        }
    rotary = {
        "max_position_embeddings": shape.context_length,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "intermediate_size": shape.intermediate_size,
        "hidden_act": shape.activation,
        **shared,
        **shape.extra,
    }
    if family == "gpt_neox":
        return {
            "model_type": "gpt_neox",
            "architectures": ["GPTNeoXForCausalLM"],
            "rotary_pct": shape.rotary_share,
            "rotary_emb_base": shape.rotary_base,
            "layer_norm_eps": shape.norm_epsilon,
            "use_parallel_residual": False,
            **rotary,
        }
    return {**_rms_config(shape, family), **rotary}


def _rms_config(shape: SourceShape, family: str) -> dict[str, Any]:
    """Return what Llama, Qwen2 and Qwen3 have of their own."""
    own: dict[str, Any] = {
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_size,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rotary_base,
    }
    if family == "qwen3":
        return own | {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "use_sliding_window": False,
        }
    if shape.qkv_bias and not shape.linear_bias:
        return own | {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": False,
        }
    return own | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": shape.linear_bias,
        "mlp_bias": shape.linear_bias,
    }
