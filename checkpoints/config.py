"""The shape of a decoder, read from config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightjar.checkpoints.errors import CheckpointError
from nightjar.checkpoints.json_file import read_json_object

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

# No decoder comes near these; a size past one is a damaged file, not a model.
LIMITS = {
    "vocab_size": 10_000_000,
    "n_positions": 10_000_000,
    "n_embd": 1_000_000,
    "n_layer": 10_000,
    "n_head": 100_000,
    "n_inner": 10_000_000,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder, whatever its family.

    vocab_size counts the rows of the embedding table; context_length the positions.
    attention_scales holds the factor on each layer's attention scores.
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
    norm_epsilon: float
    activation: str
    tied_embeddings: bool
    attention_scales: tuple[float, ...]
    eos_token_ids: tuple[int, ...]

    @staticmethod
    def read(directory: Path) -> ModelConfig:
        """Read config.json, and generation_config.json for the end-of-text tokens."""
        path = directory / "config.json"
        if not path.is_file():
            raise CheckpointError(
                f"{directory}: no config.json; give a Hugging Face model directory"
            )
        config = read_json_object(path)
        family = config.get("model_type")
        if not isinstance(family, str) or family not in READERS:
            known = ", ".join(READERS)
            raise CheckpointError(f"{path}: model_type {family!r} is not supported: {known}")
        eos = _eos_token_ids(directory, config)
        return READERS[family](path, config, eos)


def _gpt2(path: Path, config: dict[str, Any], eos: tuple[int, ...]) -> ModelConfig:
    """GPT-2's keys; what is absent takes the value transformers gives it."""
    hidden = _size(path, config, "n_embd", 768)
    n_heads = _size(path, config, "n_head", 12)
    n_layers = _size(path, config, "n_layer", 12)
    if hidden % n_heads:
        raise CheckpointError(f"{path}: n_embd {hidden} is not a multiple of n_head {n_heads}")
    if config.get("add_cross_attention"):
        raise CheckpointError(f"{path}: add_cross_attention: only plain decoders are supported")
    name = config.get("activation_function", "gelu_new")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise CheckpointError(f"{path}: activation_function {name!r} is not supported: {known}")
    inner = 4 * hidden
    if config.get("n_inner") is not None:
        inner = _size(path, config, "n_inner", inner)
    head_size = hidden // n_heads
    scale = head_size**-0.5 if config.get("scale_attn_weights", True) else 1.0
    by_layer = bool(config.get("scale_attn_by_inverse_layer_idx", False))
    scales = tuple(scale / (layer + 1 if by_layer else 1) for layer in range(n_layers))
    vocab_size = _size(path, config, "vocab_size", 50257)
    return ModelConfig(
        family="gpt2",
        vocab_size=vocab_size,
        context_length=_size(path, config, "n_positions", 1024),
        hidden_size=hidden,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_size=head_size,
        intermediate_size=inner,
        norm_epsilon=_epsilon(path, config, "layer_norm_epsilon", 1e-5),
        activation=ACTIVATIONS[name],
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        attention_scales=scales,
        eos_token_ids=tuple(token for token in eos if token < vocab_size),
    )


READERS = {"gpt2": _gpt2}


def _size(path: Path, config: dict[str, Any], key: str, default: int) -> int:
    """A positive whole number within reason."""
    value = config.get(key, default)
    if type(value) is not int or not 1 <= value <= LIMITS[key]:
        raise CheckpointError(
            f"{path}: {key} is {value!r}: expected a whole number from 1 to {LIMITS[key]}"
        )
    return value


def _epsilon(path: Path, config: dict[str, Any], key: str, default: float) -> float:
    """The small number under a norm's square root."""
    value = config.get(key, default)
    if type(value) not in (int, float) or not 0 < value < 1:
        raise CheckpointError(f"{path}: {key} is {value!r}: expected a number between 0 and 1")
    return float(value)


def _eos_token_ids(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """eos_token_id as a tuple, from generation_config.json or else from config.json."""
    path, source = directory / "config.json", config
    generation = directory / "generation_config.json"
    if generation.is_file():
        found = read_json_object(generation)
        if found.get("eos_token_id") is not None:
            path, source = generation, found
    value = source.get("eos_token_id")
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int or token < 0 for token in tokens):
        raise CheckpointError(f"{path}: eos_token_id is {value!r}: expected token ids")
    return tuple(tokens)
