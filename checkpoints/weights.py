"""Compares the tensors that a configuration needs with those in the weight files.

Only headers are read. So a directory whose weights belong to another configuration is refused
before anything is queued or loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nightjar.checkpoints.config import ModelConfig
from nightjar.checkpoints.errors import CheckpointError
from nightjar.checkpoints.safetensors_header import SafetensorsHeader

Shape = tuple[int, ...]
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorNames:
    """A family's names of tensors; a layer's names follow `layer`.

    prefix: comes before the decoder's names in a checkpoint that has a head as well.
    query_key_value, mlp_in: one fused tensor, or one for each part (mlp_in: gate, then up).
    input_major: projections are stored [in, out] rather than [out, in].
    interleaved: the fused query_key_value holds each head's query, key and value together.
    """

    prefix: str
    tokens: str
    layer: str
    attention_norm: str
    query_key_value: tuple[str, ...]
    attention_out: str
    mlp_norm: str
    mlp_in: tuple[str, ...]
    mlp_out: str
    last_norm: str
    head: str = "lm_head"
    positions: str = ""
    qk_norms: tuple[str, str] = ("", "")
    post_norms: tuple[str, str] = ("", "")
    input_major: bool = False
    interleaved: bool = False

    def projections(self, config: ModelConfig) -> dict[str, tuple[int, int, bool]]:
        """Return a layer's projections: name -> (inputs, outputs, whether it has a bias)."""
        hidden, inner = config.hidden_size, config.intermediate_size
        queries = config.n_heads * config.head_size
        keys = config.n_kv_heads * config.head_size
        fused = len(self.query_key_value) == 1
        outputs = (queries + 2 * keys,) if fused else (queries, keys, keys)
        return {
            **{
                name: (hidden, size, config.qkv_bias)
                for name, size in zip(self.query_key_value, outputs, strict=True)
            },
            self.attention_out: (queries, hidden, config.attention_out_bias),
            **dict.fromkeys(self.mlp_in, (hidden, inner, config.mlp_bias)),
            self.mlp_out: (inner, hidden, config.mlp_bias),
        }

    def layer_norms(self, config: ModelConfig) -> dict[str, int]:
        """Return a layer's norms: name -> width."""
        names = [
            self.attention_norm,
            self.mlp_norm,
            *(self.post_norms if config.post_norms else ()),
        ]
        norms = dict.fromkeys(names, config.hidden_size)
        return norms | dict.fromkeys(self.qk_norms if config.qk_norm else (), config.head_size)


GPT2 = TensorNames(
    prefix="transformer.",
    tokens="wte",
    positions="wpe",
    layer="h",
    attention_norm="ln_1",
    query_key_value=("attn.c_attn",),
    attention_out="attn.c_proj",
    mlp_norm="ln_2",
    mlp_in=("mlp.c_fc",),
    mlp_out="mlp.c_proj",
    last_norm="ln_f",
    input_major=True,
)
GPT_NEOX = TensorNames(
    prefix="gpt_neox.",
    tokens="embed_in",
    layer="layers",
    attention_norm="input_layernorm",
    query_key_value=("attention.query_key_value",),
    attention_out="attention.dense",
    mlp_norm="post_attention_layernorm",
    mlp_in=("mlp.dense_h_to_4h",),
    mlp_out="mlp.dense_4h_to_h",
    last_norm="final_layer_norm",
    head="embed_out",
    interleaved=True,
)
LLAMA = TensorNames(
    prefix="model.",
    tokens="embed_tokens",
    layer="layers",
    attention_norm="input_layernorm",
    query_key_value=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_out="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    mlp_in=("mlp.gate_proj", "mlp.up_proj"),
    mlp_out="mlp.down_proj",
    last_norm="norm",
    qk_norms=("self_attn.q_norm", "self_attn.k_norm"),
    post_norms=("post_norm1", "post_norm2"),
)

TENSOR_NAMES = {
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "hyperclovax"), LLAMA),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of a tensor: its file, its name there, how it is stored."""

    path: Path
    stored_name: str
    dtype: str
    shape: Shape


def find_tensors(
    config: ModelConfig, headers: Iterable[SafetensorsHeader]
) -> dict[str, StoredTensor]:
    """Return every tensor of the files, by its name without the family's optional prefix."""
    prefix = TENSOR_NAMES[config.family].prefix
    return {
        stored.removeprefix(prefix): StoredTensor(header.path, stored, dtype, shape)
        for header in headers
        for stored, (dtype, shape) in header.tensors.items()
    }


def check_tensors(
    directory: Path, config: ModelConfig, tensors: Mapping[str, StoredTensor]
) -> None:
    """Raise an error unless each needed tensor is there, in floating point, with its shape."""
    for name, expected in expected_tensors(config).items():
        if name not in tensors:
            raise CheckpointError(
                f"{directory}: the weights hold no tensor {name!r}, which config.json asks for; "
                "the two belong to different models or a shard is missing"
            )
        found = tensors[name]
        if found.shape != expected:
            raise CheckpointError(
                f"{found.path}: tensor {name!r} has shape {list(found.shape)}, but config.json "
                f"asks for {list(expected)}; use the config.json that was saved with these weights"
            )
        if found.dtype not in FLOAT_TYPES:
            raise CheckpointError(
                f"{found.path}: tensor {name!r} is stored as {found.dtype}; save it as one of "
                f"{', '.join(FLOAT_TYPES)}"
            )


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Yield names and shapes of all weights.

    Checkpoints may hold more: causal masks, rotary frequencies, or a head that equals the
    embedding table.
    """
    names = TENSOR_NAMES[config.family]
    shapes: dict[str, Shape] = {}

    def add_norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"] = (width,)
        if config.norm == "layer_norm":
            shapes[f"{name}.bias"] = (width,)

    table = (config.vocab_size, config.hidden_size)
    shapes[f"{names.tokens}.weight"] = table
    if config.rope is None:
        shapes[f"{names.positions}.weight"] = (config.context_length, config.hidden_size)
    for layer in range(config.n_layers):
        root = f"{names.layer}.{layer}."
        for name, width in names.layer_norms(config).items():
            add_norm(root + name, width)
        for name, (inputs, outputs, bias) in names.projections(config).items():
            shape = (inputs, outputs) if names.input_major else (outputs, inputs)
            shapes[f"{root}{name}.weight"] = shape
            if bias:
                shapes[f"{root}{name}.bias"] = (outputs,)
    add_norm(names.last_norm, config.hidden_size)
    if not config.tied_embeddings:
        shapes[f"{names.head}.weight"] = table
    return shapes
