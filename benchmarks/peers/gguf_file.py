"""A Hugging Face directory of the benchmarks (models.py) as a GGUF file for llama.cpp."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

# Of the writer's method add_NAME: the key of GPT-2's config, and of Llama's.
SHAPE = (
    ("context_length", "n_positions", "max_position_embeddings"),
    ("embedding_length", "n_embd", "hidden_size"),
    ("block_count", "n_layer", "num_hidden_layers"),
    ("head_count", "n_head", "num_attention_heads"),
    ("feed_forward_length", "n_inner", "intermediate_size"),
    ("layer_norm_eps", "layer_norm_epsilon", None),
    ("layer_norm_rms_eps", None, "rms_norm_eps"),
    ("head_count_kv", None, "num_key_value_heads"),
    ("rope_dimension_count", None, "head_dim"),
    ("rope_freq_base", None, "rope_theta"),
    ("vocab_size", None, "vocab_size"),
)


def write_gguf(model: Path, file: Path, kind: str) -> None:
    """Write `model` with its matrices stored as kind: F32, BF16 or Q8_0."""
    config = json.loads((model / "config.json").read_text())
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, config["model_type"])
    _write_shape(writer, config)
    _write_tokenizer(writer, model)
    stored = gguf.GGMLQuantizationType[kind]
    architecture = gguf.MODEL_ARCH[config["model_type"].upper()]
    layers = config.get("n_layer") or config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(architecture, layers)
    for name, weight in load_file(model / "model.safetensors").items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        array = _values(name, weight, config)
        if array.ndim == 1 or theirs.startswith("position_embd"):
            writer.add_tensor(theirs, array.astype(np.float32))
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(file)


def _write_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    for name, of_gpt2, of_llama in SHAPE:
        key = of_gpt2 if config["model_type"] == "gpt2" else of_llama
        if key is not None:
            getattr(writer, f"add_{name}")(config[key])


def _write_tokenizer(writer: gguf.GGUFWriter, model: Path) -> None:
    described = json.loads((model / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    special = {token["content"] for token in described["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [
        gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens
    ]
    merges = described["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def _values(name: str, weight: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """A tensor's values as llama.cpp wants them."""
    if ".h." in name and weight.ndim == 2:
        return np.ascontiguousarray(weight.T)  # GPT-2 stores its matrices as [in, out]
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = heads.get(name.split(".")[-2])
    return weight if key is None else _interleaved(weight, config[key])


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [2, half] of each head as [half, 2]: llama.cpp rotates neighbouring pairs."""
    out, width = weight.shape
    halves = weight.reshape(heads, 2, out // heads // 2, width).swapaxes(1, 2)
    return np.ascontiguousarray(halves.reshape(out, width))
