"""From a checked model directory to a decoder."""

from __future__ import annotations

import torch

from nightjar.checkpoints import CheckpointError, ModelDirectory
from nightjar.gpu_worker.models.decoder import Decoder
from nightjar.gpu_worker.models.gpt2 import gpt2_shapes, gpt2_weights
from nightjar.gpu_worker.models.weight_reader import WeightReader

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# For each family: the shapes its config asks for, and how its weights become a decoder's.
FAMILIES = {"gpt2": (gpt2_shapes, gpt2_weights)}


def load_model(directory: ModelDirectory, dtype: str, device: str = "cpu") -> Decoder:
    """Load the weights of a model directory.

    dtype: "fp32" or "bf16", the storage of weights, activations and cache.  Raises
    CheckpointError where weights are missing or of another shape than config.json says, before
    any of them is read.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: one of {', '.join(DTYPES)}")
    config = directory.config
    if config.family not in FAMILIES:
        raise CheckpointError(f"{directory.path}: no decoder for model_type {config.family!r}")
    shapes, build = FAMILIES[config.family]
    with torch.inference_mode(), WeightReader(directory) as reader:
        reader.check(shapes(config))
        weights = build(config, reader, DTYPES[dtype], device)
    return Decoder(config, weights, DTYPES[dtype], device)
