"""A Hugging Face directory of the benchmarks (models.py) as a GGUF file for llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

GPT2_NAMES = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
LLAMA_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(model: Path, file: Path, kind: str) -> None:
    """Write `model` with its matrices stored as kind: F32, BF16 or Q8_0."""
    config = json.loads((model / "config.json").read_text())
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, config["model_type"])
    _write_shape(writer, config)
    _write_tokenizer(writer, model)
    stored = gguf.GGMLQuantizationType[kind]
    for name, weight in load_file(model / "model.safetensors").items():
        ours, array = _tensor(name, weight, config)
        if array.ndim == 1 or ours.startswith("position_embd"):
            writer.add_tensor(ours, array.astype(np.float32))
        else:
            data = gguf.quants.quantize(array, stored)
            writer.add_tensor(ours, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(file)


def _write_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    if config["model_type"] == "gpt2":
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_block_count(config["n_layer"])
        writer.add_head_count(config["n_head"])
        writer.add_feed_forward_length(config["n_inner"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


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


def _tensor(name: str, weight: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    """llama.cpp's name of a tensor, and its values as llama.cpp wants them."""
    stem, _, part = name.rpartition(".")
    if stem in OUTER_NAMES:
        return f"{OUTER_NAMES[stem]}.{part}", weight
    if config["model_type"] == "gpt2":
        _, _, layer, inner = stem.split(".", 3)
        # GPT-2 stores its matrices as [in, out].
        array = np.ascontiguousarray(weight.T) if weight.ndim == 2 else weight
        return f"blk.{layer}.{GPT2_NAMES[inner]}.{part}", array
    _, _, layer, inner = stem.split(".", 3)
    heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
    if inner in heads:
        weight = _interleaved(weight, config[heads[inner]])
    return f"blk.{layer}.{LLAMA_NAMES[inner]}.{part}", weight


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [2, half] of each head as [half, 2]: llama.cpp rotates neighbouring pairs."""
    out, width = weight.shape
    halves = weight.reshape(heads, 2, out // heads // 2, width).swapaxes(1, 2)
    return np.ascontiguousarray(halves.reshape(out, width))
