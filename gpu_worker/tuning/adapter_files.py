"""PEFT's files of a prompt: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.tuning.checkpoint import replace_file
from nightjar.gpu_worker.tuning.options import TuneOptions

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
TRAINED_FOR = "nightjar_model"


def write_adapter(
    folder: Path, vectors: Tensor, directory: ModelDirectory, options: TuneOptions
) -> None:
    """Write vectors float32[n, H] as PEFT saves prompt tuning or P-tuning for inference."""
    metadata = {"format": "pt", TRAINED_FOR: directory.fingerprint}
    data = save({"prompt_embeddings": vectors.cpu().contiguous()}, metadata)
    replace_file(folder / WEIGHTS_NAME, data)
    told = json.dumps(_config(vectors, directory, options), indent=2)
    replace_file(folder / CONFIG_NAME, told.encode() + b"\n")


def _config(vectors: Tensor, directory: ModelDirectory, options: TuneOptions) -> dict[str, Any]:
    config = directory.config
    shared: dict[str, Any] = {
        "base_model_name_or_path": directory.name,
        "inference_mode": True,
        "num_attention_heads": config.n_heads,
        "num_layers": config.n_layers,
        "num_transformer_submodules": 1,
        "num_virtual_tokens": vectors.shape[0],
        "task_type": "CAUSAL_LM",
        "token_dim": vectors.shape[1],
    }
    if options.encoder == "none":
        return shared | {"peft_type": "PROMPT_TUNING", "prompt_tuning_init": "RANDOM"}
    return shared | {
        "peft_type": "P_TUNING",
        "encoder_dropout": 0.0,
        "encoder_hidden_size": vectors.shape[1],
        "encoder_num_layers": 2,
        "encoder_reparameterization_type": "MLP",
    }
