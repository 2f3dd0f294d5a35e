"""LoRA adapters as PEFT writes them, and merged by hand: the reader shares no code with this."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Sizes = dict[str, tuple[int, int]]
"""Module names, as transformers has them -> (inputs, outputs)."""


def linear_sizes(model: torch.nn.Module, modules: Iterable[str]) -> Sizes:
    """The linear layers of a transformers model whose last name is one of `modules`."""
    wanted = set(modules)
    found: Sizes = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in wanted and hasattr(module, "weight"):
            shape = tuple(module.weight.shape)
            is_conv = type(module).__name__ == "Conv1D"
            found[name] = (shape[0], shape[1]) if is_conv else (shape[1], shape[0])
    return found


def gpt2_sizes(layers: int, width: int, inner: int, prefix: str = "transformer.") -> Sizes:
    """The linear layers of a GPT-2."""
    sizes = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, inner),
        "mlp.c_proj": (inner, width),
    }
    return {f"{prefix}h.{i}.{name}": size for i in range(layers) for name, size in sizes.items()}


def save_adapter(
    folder: Path,
    sizes: Sizes,
    rank: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    strength: float = 1.0,
    **config: Any,
) -> Path:
    """Write a directory of PEFT with random factors for these modules; returns it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (inputs, outputs) in sizes.items():
        root = f"base_model.model.{name}"
        down = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
        up = torch.randn(outputs, rank, generator=generator) * strength * rank**-0.5
        tensors[f"{root}.lora_A.weight"] = down.to(dtype)
        tensors[f"{root}.lora_B.weight"] = up.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "target_modules": sorted({name.rpartition(".")[2] for name in sizes}),
        "bias": "none",
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "init_lora_weights": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(about | config))
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    return folder


@torch.no_grad()
def merge(model: torch.nn.Module, folder: Path) -> None:
    """Add an adapter to the weights of a transformers model, in the model's precision."""
    about = json.loads((folder / "adapter_config.json").read_bytes())
    tensors = load_file(str(folder / "adapter_model.safetensors"))
    modules = dict(model.named_modules())
    for name in sorted(tensors):
        if not name.endswith(".lora_A.weight"):
            continue
        root = name.removesuffix(".lora_A.weight")
        down, up = tensors[name].double(), tensors[f"{root}.lora_B.weight"].double()
        rank = down.shape[0]
        scale = about["lora_alpha"] / (math.sqrt(rank) if about["use_rslora"] else rank)
        module = modules[root.removeprefix("base_model.model.")]
        added = scale * up @ down
        weight = module.weight
        weight.add_((added.t() if type(module).__name__ == "Conv1D" else added).to(weight.dtype))
