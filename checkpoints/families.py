"""Reading config.json: one reader for each family of decoders.

An absent key has the value that transformers gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nightjar.checkpoints.config import ModelConfig
from nightjar.checkpoints.config_fields import (
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INNER,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    ConfigFields,
)
from nightjar.checkpoints.errors import CheckpointError
from nightjar.checkpoints.json_file import read_json_object
from nightjar.checkpoints.rope import read_rope, scaled_context

# What config.json calls an activation -> what the kernels call it.  The three tanh forms of GELU
# are one formula.
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def read_config(directory: Path) -> ModelConfig:
    """Read config.json, and generation_config.json for the end-of-text tokens."""
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory}: no config.json; give a Hugging Face model directory")
    config = ConfigFields(path, read_json_object(path))
    family = config.values.get("model_type")
    if not isinstance(family, str) or family not in READERS:
        raise config.error(f"model_type {family!r} is not supported: {', '.join(READERS)}")
    _refuse_quantized(config)
    found = READERS[family](config)
    eos = _eos_token_ids(directory, config)
    return replace(found, eos_token_ids=tuple(token for token in eos if token < found.vocab_size))


def _gpt2(config: ConfigFields) -> ModelConfig:
    """GPT-2: learned positions, layer norms, biases everywhere."""
    hidden = config.size("n_embd", MAX_HIDDEN)
    n_heads = config.size("n_head", MAX_HEADS)
    n_layers = config.size("n_layer", MAX_LAYERS)
    head_size = _share(config, hidden, "n_embd", n_heads, "n_head")
    if config.flag("add_cross_attention", False):
        raise config.error("add_cross_attention: only plain decoders are supported")
    scale = head_size**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    return ModelConfig(
        family="gpt2",
        vocab_size=config.size("vocab_size", MAX_VOCAB),
        context_length=config.size("n_positions", MAX_POSITIONS),
        hidden_size=hidden,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_size=head_size,
        intermediate_size=config.optional_size("n_inner", MAX_INNER) or 4 * hidden,
        norm="layer_norm",
        norm_epsilon=config.number("layer_norm_epsilon", 1e-5, 0, 1),
        activation=config.word("activation_function", "gelu_new", ACTIVATIONS),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        attention_scales=tuple(scale / (i + 1 if by_layer else 1) for i in range(n_layers)),
        eos_token_ids=(),
    )


def _gpt_neox(config: ConfigFields) -> ModelConfig:
    """GPT-NeoX (Polyglot-Ko, Pythia): a share of each head rotated, parallel residual."""
    hidden = config.size("hidden_size", MAX_HIDDEN)
    n_heads = config.size("num_attention_heads", MAX_HEADS)
    n_layers = config.size("num_hidden_layers", MAX_LAYERS)
    head_size = _share(config, hidden, "hidden_size", n_heads, "num_attention_heads")
    positions = config.size("max_position_embeddings", MAX_POSITIONS)
    fraction = config.number("rotary_pct", 0.25, 0, 1)
    rope = read_rope(config, head_size, positions, "rotary_emb_base", fraction)
    attention_bias = config.flag("attention_bias", True)
    return ModelConfig(
        family="gpt_neox",
        vocab_size=config.size("vocab_size", MAX_VOCAB),
        context_length=scaled_context(rope, positions),
        hidden_size=hidden,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_size=head_size,
        intermediate_size=config.size("intermediate_size", MAX_INNER),
        norm="layer_norm",
        norm_epsilon=config.number("layer_norm_eps", 1e-5, 0, 1),
        activation=config.word("hidden_act", "gelu", ACTIVATIONS),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        attention_scales=(head_size**-0.5,) * n_layers,
        eos_token_ids=(),
        rope=rope,
        parallel_residual=config.flag("use_parallel_residual", True),
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
    )


def _llama(config: ConfigFields) -> ModelConfig:
    """Llama, and HyperCLOVA X SEED's small models, which are Llamas."""
    attention_bias = config.flag("attention_bias", False)
    return replace(
        _rms_gated("llama", config),
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


def _mistral(config: ConfigFields) -> ModelConfig:
    """Mistral: Llama with a sliding window in every layer, which bounds the context."""
    found = _rms_gated("mistral", config, n_kv_heads=8)
    window = config.optional_size("sliding_window", MAX_POSITIONS)
    if "sliding_window" not in config.values:
        window = 4096
    return _windowed(found, window)


def _qwen2(config: ConfigFields) -> ModelConfig:
    """Qwen2 and 2.5: Llama with biases on queries, keys and values."""
    found = _rms_gated("qwen2", config)
    return _windowed(replace(found, qkv_bias=True), _qwen_window(config, found.n_layers))


def _qwen3(config: ConfigFields) -> ModelConfig:
    """Qwen3: Llama with norms on queries and keys."""
    found = _rms_gated("qwen3", config, head_dim=128)
    bias = config.flag("attention_bias", False)
    found = replace(found, qkv_bias=bias, attention_out_bias=bias, qk_norm=True)
    return _windowed(found, _qwen_window(config, found.n_layers))


def _hyperclovax(config: ConfigFields) -> ModelConfig:
    """HyperCLOVA X SEED Think: Llama with muP multipliers and norms on what the blocks give."""
    found = _rms_gated("hyperclovax", config)
    scale = config.number("attention_multiplier", found.attention_scales[0], 0)
    attention_bias = config.flag("attention_bias", False)
    return replace(
        found,
        attention_scales=(scale,) * found.n_layers,
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
        post_norms=config.flag("use_post_norm", True),
        embedding_multiplier=config.number("embedding_multiplier", 1.0, 0),
        residual_multiplier=config.number("residual_multiplier", 1.0, 0),
        logits_multiplier=config.number("logits_scaling", 1.0, 0),
    )


READERS: dict[str, Callable[[ConfigFields], ModelConfig]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "hyperclovax": _hyperclovax,
}


def _rms_gated(
    family: str,
    config: ConfigFields,
    *,
    n_kv_heads: int | None = None,
    head_dim: int | None = None,
) -> ModelConfig:
    """Read what Llama and its relatives share.

    They have RMS norms, rotary embeddings, a gated feed-forward block, and grouped key and value
    heads.  The named values are the family's defaults for absent keys.
    """
    hidden = config.size("hidden_size", MAX_HIDDEN)
    n_heads = config.size("num_attention_heads", MAX_HEADS)
    n_layers = config.size("num_hidden_layers", MAX_LAYERS)
    kv_heads = config.optional_size("num_key_value_heads", MAX_HEADS)
    if kv_heads is None:
        absent = "num_key_value_heads" not in config.values
        kv_heads = (n_kv_heads or n_heads) if absent else n_heads
    _share(config, n_heads, "num_attention_heads", kv_heads, "num_key_value_heads")
    head_size = config.optional_size("head_dim", MAX_HIDDEN) or head_dim
    if head_size is None:
        head_size = _share(config, hidden, "hidden_size", n_heads, "num_attention_heads")
    if config.number("partial_rotary_factor", 1.0, 0) != 1.0:
        raise config.error("partial_rotary_factor: only gpt_neox models rotate a part of a head")
    length = config.size("max_position_embeddings", MAX_POSITIONS)
    rope = read_rope(config, head_size, length, "rope_theta")
    if rope.dims != head_size:
        raise config.error("partial_rotary_factor: only gpt_neox models rotate a part of a head")
    return ModelConfig(
        family=family,
        vocab_size=config.size("vocab_size", MAX_VOCAB),
        context_length=scaled_context(rope, length),
        hidden_size=hidden,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=kv_heads,
        head_size=head_size,
        intermediate_size=config.size("intermediate_size", MAX_INNER),
        norm="rms_norm",
        norm_epsilon=config.number("rms_norm_eps", 1e-6, 0, 1),
        activation=config.word("hidden_act", "silu", ACTIVATIONS),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        attention_scales=(head_size**-0.5,) * n_layers,
        eos_token_ids=(),
        rope=rope,
        gated=True,
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
    )


def _qwen_window(config: ConfigFields, n_layers: int) -> int | None:
    """Return the sliding window of the layers that have one, or None."""
    if not config.flag("use_sliding_window", False):
        return None
    window = config.optional_size("sliding_window", MAX_POSITIONS)
    kinds = config.values.get("layer_types")
    if kinds is None:
        first = config.optional_size("max_window_layers", MAX_LAYERS) or 28
        return window if first < n_layers else None
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        raise config.error(f"layer_types is {kinds!r}: expected a list of {' and '.join(known)}")
    return window if "sliding_attention" in kinds else None


def _windowed(config: ModelConfig, window: int | None) -> ModelConfig:
    """Bound the context by the sliding window.

    Within the window, a layer with sliding attention sees every position, so full attention is
    exact.  Past it full attention is not exact, so the context ends there.
    """
    if window is None or window >= config.context_length:
        return config
    return replace(config, context_length=window)


def _share(config: ConfigFields, whole: int, whole_key: str, parts: int, parts_key: str) -> int:
    """Return whole / parts, which must be a whole number."""
    if whole % parts:
        raise config.error(f"{whole_key} {whole} is not a multiple of {parts_key} {parts}")
    return whole // parts


def _refuse_quantized(config: ConfigFields) -> None:
    """Refuse weights that another program packed, because they are no plain tensors."""
    found = config.inner("quantization_config")
    if found is not None:
        method = found.values.get("quant_method")
        raise config.error(
            f"quantization_config: weights quantized by {method!r} are not supported; use the "
            "model's plain weights (bf16, fp16 or fp32)"
        )


def _eos_token_ids(directory: Path, config: ConfigFields) -> tuple[int, ...]:
    """Return eos_token_id as a tuple, from generation_config.json or else from config.json."""
    source = config
    generation = directory / "generation_config.json"
    if generation.is_file():
        found = ConfigFields(generation, read_json_object(generation))
        if found.values.get("eos_token_id") is not None:
            source = found
    value = source.values.get("eos_token_id")
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int or token < 0 for token in tokens):
        raise source.error(f"eos_token_id is {value!r}: expected token ids")
    return tuple(tokens)
