"""Models of the benchmarks: seeded random weights in Hugging Face directories.

A random model says the same token for ever unless what its blocks add outweighs the embedding, so
the blocks' weights are larger than an initialisation's.  The vocabulary is made of invented words
of ASCII letters; special tokens and single bytes have zero rows in the head, so their logits are
0, the best logit is always above, and every system's detokenizer gives the same text.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

SPECIAL_TOKENS = ("<|endoftext|>", "<|PROMPT|>")
NEVER_GENERATED = len(SPECIAL_TOKENS) + 256
"""Ids below this one are special tokens and single bytes."""

CONSONANTS = "bcdfghjklmnprstvwxyz"
VOWELS = "aeiou"


@dataclass(frozen=True)
class Shape:
    """What a model looks like.

    block_scale multiplies the standard deviation of the blocks' weights over 0.16 / sqrt(width).
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab_size: int
    context: int
    block_scale: float

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


GPT2_SMALL = Shape("gpt2-small", "gpt2", 12, 768, 12, 12, 3072, 32_000, 1024, 8.0)
LLAMA_HALF = Shape("llama-0.44b", "llama", 24, 1024, 16, 8, 4096, 32_000, 1024, 4.0)
TINY_GPT2 = Shape("tiny-gpt2", "gpt2", 2, 128, 4, 4, 256, 2_000, 1024, 8.0)
TINY_LLAMA = Shape("tiny-llama", "llama", 2, 128, 4, 2, 256, 2_000, 1024, 8.0)
"""The tiny shapes are for trying the runners, not for figures."""
MEASURED = (GPT2_SMALL.name, LLAMA_HALF.name)
SHAPES = {shape.name: shape for shape in (GPT2_SMALL, LLAMA_HALF, TINY_GPT2, TINY_LLAMA)}


def _vocabulary(size: int, seed: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Special tokens, bytes, then words of one to three syllables after a space, and the merges
    that make each of them one token.  `Ġ` is byte-level BPE's space."""
    syllables = [c + v for c, v in product(CONSONANTS, VOWELS)]
    merges = [(c, v) for c, v in product(CONSONANTS, VOWELS)]
    merges += [("Ġ", syllable) for syllable in syllables]
    pairs = [(f"Ġ{a}", b) for a, b in product(syllables, syllables)]
    triples = [(f"Ġ{a}{b}", c) for a, b, c in product(syllables, syllables, syllables)]
    random.Random(seed).shuffle(triples)
    base = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = (merges + pairs + triples)[: size - len(base)]
    tokens = base + [left + right for left, right in merges]
    if len(tokens) != size:
        raise ValueError(f"vocabulary of {size}: at least {len(base)} and at most {len(tokens)}")
    return {token: index for index, token in enumerate(tokens)}, merges


def save_tokenizer(directory: Path, vocab_size: int, seed: int = 0) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    vocabulary, merges = _vocabulary(vocab_size, seed)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "bos_token": SPECIAL_TOKENS[0],
        "unk_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(about))


class _Normal:
    """Seeded normal weights."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *size: int, std: float, mean: float = 0.0) -> Tensor:
        return torch.randn(*size, generator=self._generator).mul_(std).add_(mean)

    def head(self, *size: int, std: float) -> Tensor:
        """An embedding or head [V, H] whose first rows are zero."""
        weight = self(*size, std=std)
        weight[:NEVER_GENERATED] = 0
        return weight


def _gpt2_weights(shape: Shape, normal: _Normal) -> dict[str, Tensor]:
    width, inner = shape.hidden, shape.intermediate
    std = shape.block_scale * 0.16 / width**0.5
    weights = {
        "wte.weight": normal.head(shape.vocab_size, width, std=0.1),
        "wpe.weight": normal(shape.context, width, std=0.1),
        "ln_f.weight": normal(width, std=0.1, mean=1.0),
        "ln_f.bias": normal(width, std=0.1),
    }
    sizes = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, inner),
        "mlp.c_proj": (inner, width),
    }
    for layer in range(shape.layers):
        for norm in ("ln_1", "ln_2"):
            weights[f"h.{layer}.{norm}.weight"] = normal(width, std=0.1, mean=1.0)
            weights[f"h.{layer}.{norm}.bias"] = normal(width, std=0.1)
        for name, size in sizes.items():
            weights[f"h.{layer}.{name}.weight"] = normal(*size, std=std)
            weights[f"h.{layer}.{name}.bias"] = normal(size[1], std=0.1)
    return {f"transformer.{name}": weight for name, weight in weights.items()}


def _llama_weights(shape: Shape, normal: _Normal) -> dict[str, Tensor]:
    width, inner, kv = shape.hidden, shape.intermediate, shape.kv_heads * shape.head_size
    std = shape.block_scale * 0.16 / width**0.5
    sizes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    weights = {
        "model.embed_tokens.weight": normal(shape.vocab_size, width, std=0.1),
        "lm_head.weight": normal.head(shape.vocab_size, width, std=0.1),
        "model.norm.weight": normal(width, std=0.1, mean=1.0),
    }
    for layer in range(shape.layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = normal(width, std=0.1, mean=1.0)
        for name, size in sizes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = normal(*size, std=std)
    return weights


def _gpt2_config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_layer": shape.layers,
        "n_embd": shape.hidden,
        "n_head": shape.heads,
        "n_inner": shape.intermediate,
        "n_positions": shape.context,
        "n_ctx": shape.context,
        "tie_word_embeddings": True,
    }


def _llama_config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "rope_theta": 10_000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


_FAMILIES = {"gpt2": (_gpt2_config, _gpt2_weights), "llama": (_llama_config, _llama_weights)}


def save_model(directory: Path, shape: Shape, seed: int = 0) -> Path:
    """Write the model's directory unless it is there whole; returns it."""
    done = directory / "config.json"  # written last
    if done.is_file():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    make_config, make_weights = _FAMILIES[shape.family]
    weights = make_weights(shape, _Normal(seed))
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    save_tokenizer(directory, shape.vocab_size)
    about = {
        "vocab_size": shape.vocab_size,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    done.write_text(json.dumps(make_config(shape) | about, indent=2))
    return directory
