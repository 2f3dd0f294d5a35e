"""Small models of transformers that Megatron-LM could have trained, and their tokenizer."""

import json
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.models import save_tokenizer

VOCABULARY = 389
"""Tokens; the tables are padded, and no multiple of a power of two."""


def gpt2(tied=True, activation="gelu_new"):
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=48,
        n_embd=32,
        n_layer=4,
        n_head=4,
        activation_function=activation,
        tie_word_embeddings=tied,
    )
    return seeded(GPT2LMHeadModel, config)


def neox():
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=48,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        hidden_act="gelu_new",
        use_parallel_residual=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    )
    return seeded(GPTNeoXForCausalLM, config)


def rms(cls, config_cls, **own):
    config = config_cls(
        vocab_size=VOCABULARY,
        max_position_embeddings=48,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        **own,
    )
    return seeded(cls, config)


def llama():
    return rms(LlamaForCausalLM, LlamaConfig, num_key_value_heads=2)


def qwen2():
    return rms(Qwen2ForCausalLM, Qwen2Config, num_key_value_heads=2)


def qwen3():
    return rms(Qwen3ForCausalLM, Qwen3Config, num_key_value_heads=2, head_dim=16)


def seeded(cls, config):
    """A model whose weights are all different, biases and norms included."""
    torch.manual_seed(11)
    model = cls(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.3)
    return model


def save_whole_tokenizer(folder: Path) -> Path:
    """Save a tokenizer of exactly VOCABULARY tokens."""
    save_tokenizer(folder, VOCABULARY)
    extend(folder / "tokenizer.json", VOCABULARY)
    return folder


def extend(path: Path, size: int):
    """Add tokens until the tokenizer has so many."""
    content = json.loads(path.read_text())
    known = set(content["model"]["vocab"]) | {token["content"] for token in content["added_tokens"]}
    for index in range(len(known), size):
        content["model"]["vocab"][f"extra{index}"] = index
    path.write_text(json.dumps(content))
