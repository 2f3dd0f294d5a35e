"""From a checked model directory to a decoder."""

from __future__ import annotations

import torch

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models.decoder import Decoder
from nightjar.gpu_worker.models.gpt2 import gpt2_weights
from nightjar.gpu_worker.models.weight_reader import WeightReader

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# For each family that checkpoints/ reads: how its weights become a decoder's.
FAMILIES = {"gpt2": gpt2_weights}


def load_model(directory: ModelDirectory, dtype: str, device: str = "cpu") -> Decoder:
    """Load the weights of a model directory, which has checked that they are those of its config.

    dtype: "fp32" or "bf16", the storage of weights, activations and cache.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: one of {', '.join(DTYPES)}")
    config = directory.config
    with torch.inference_mode(), WeightReader(directory) as reader:
        weights = FAMILIES[config.family](config, reader, DTYPES[dtype], device)
    return Decoder(config, weights, DTYPES[dtype], device)
