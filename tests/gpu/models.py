"""Small random models whose heads have the sizes that the CUDA kernels serve."""

from __future__ import annotations

from pathlib import Path

from tests.families import Case, save_family
from tests.models import Gpt2Shape, save_gpt2

WIDTH = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 192}

LLAMA = Case("llama", WIDTH | {"num_key_value_heads": 1})

MODELS: dict[str, Gpt2Shape | Case] = {
    "gpt2": Gpt2Shape(n_embd=128, n_head=2),
    "gpt2, heads of 80": Gpt2Shape(n_layer=3, n_embd=240, n_head=3, tied=False),
    "gpt2, heads of 96": Gpt2Shape(n_embd=192, n_head=2, activation="relu"),
    "polyglot": Case("gpt_neox", WIDTH),
    "llama": LLAMA,
    "llama, heads of 128": Case("llama", WIDTH | {"head_dim": 128, "num_key_value_heads": 2}),
    "qwen2": Case("qwen2", WIDTH | {"num_key_value_heads": 1}),
    "qwen3": Case("qwen3", WIDTH | {"num_key_value_heads": 1, "head_dim": 64}),
    "hyperclova x": Case("hyperclovax", WIDTH | {"num_key_value_heads": 1, "head_dim": 64}),
}


def save(directory: Path, made: Gpt2Shape | Case, seed: int = 5) -> Path:
    """Write a whole model directory; the same for the same seed."""
    if isinstance(made, Case):
        return save_family(directory, made, seed)
    return save_gpt2(directory, made, seed)
