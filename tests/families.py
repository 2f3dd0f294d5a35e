"""Small random models of every family, built and saved by transformers itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models import save_tokenizer

SIZES = {
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 24,
}


@dataclass(frozen=True)
class Case:
    """A model: its model_type, and what its config has beside SIZES."""

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)


def linear(base: float = 10_000.0, factor: float = 3.0) -> dict[str, Any]:
    """A plain scaling of all frequencies."""
    return {"rope_type": "linear", "rope_theta": base, "factor": factor}


CASES = {
    "polyglot": Case("gpt_neox", {"rotary_pct": 0.5, "num_hidden_layers": 3}),
    "pythia": Case("gpt_neox", {"num_attention_heads": 2, "hidden_size": 160}),
    "neox, serial": Case(
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": linear() | {"partial_rotary_factor": 1.0},
        },
    ),
    "llama": Case("llama", {"num_key_value_heads": 2}),
    "llama 3": Case(
        "llama",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama, linear": Case("llama", {"rope_parameters": linear(), "hidden_act": "gelu"}),
    "llama, dynamic": Case("llama", {"rope_parameters": linear() | {"rope_type": "dynamic"}}),
    "llama, yarn": Case("llama", {"num_key_value_heads": 1, "rope_parameters": YARN}),
    "mistral": Case("mistral", {"num_key_value_heads": 2, "head_dim": 20, "sliding_window": None}),
    "mistral, window": Case("mistral", {"num_key_value_heads": 4, "sliding_window": 70}),
    "qwen2": Case(
        "qwen2",
        {
            "hidden_size": 192,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2, window and yarn": Case(
        "qwen2",
        {
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 80,
            "max_window_layers": 1,
            "rope_parameters": YARN
            | {"beta_fast": 8, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.3},
        },
    ),
    "qwen3": Case("qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
    "qwen3, bias": Case("qwen3", {"num_key_value_heads": 4, "head_dim": 6, "attention_bias": True}),
    "hyperclova x": Case(
        "hyperclovax",
        {
            "num_key_value_heads": 2,
            "hidden_size": 160,
            "num_attention_heads": 2,
            "attention_multiplier": 0.07,
            "embedding_multiplier": 10.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.125,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e8},
        },
    ),
    "hyperclova x, bare": Case(
        "hyperclovax", {"use_post_norm": False, "residual_multiplier": 0.8, "mlp_bias": True}
    ),
}


def save_family(directory: Path, case: Case, seed: int = 0) -> Path:
    """Write a whole model directory with a byte-level tokenizer; the same for the same seed."""
    config = AutoConfig.for_model(case.model_type, **(SIZES | case.changes))
    model = AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.named_parameters()):
            tensor.copy_(_random(name, tensor, generator))
    model.save_pretrained(directory)
    save_tokenizer(directory, config.vocab_size)
    return directory


def _random(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values large enough for the output to depend on the context: transformers' own would not."""
    values = torch.randn(like.shape, generator=generator)
    if like.ndim == 1:
        return values * 0.1 + (0.0 if name.endswith("bias") else 1.0)
    if "layers" not in name:
        return values * 0.1
    return values * 1.6 * like.shape[1] ** -0.5
