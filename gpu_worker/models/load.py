"""From a checked model directory to a decoder."""

from __future__ import annotations

import torch

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models.decoder import Decoder
from nightjar.gpu_worker.models.gpt2 import gpt2_weights
from nightjar.gpu_worker.models.precision import PRECISIONS
from nightjar.gpu_worker.models.weight_reader import WeightReader

# For each family that checkpoints/ reads: how its weights become a decoder's.
FAMILIES = {"gpt2": gpt2_weights}


def load_model(directory: ModelDirectory, dtype: str, device: str = "cpu") -> Decoder:
    """Load the weights of a model directory, which has checked that they are those of its config.

    dtype: "fp32" or "bf16", the storage of weights, activations and cache; or "int8", which
    multiplies in bytes (see kernels.pack_linear) and keeps the rest in FP32.
    """
    if dtype not in PRECISIONS:
        raise ValueError(f"dtype {dtype!r}: one of {', '.join(PRECISIONS)}")
    precision = PRECISIONS[dtype]
    config = directory.config
    with torch.inference_mode(), WeightReader(directory) as reader:
        weights = FAMILIES[config.family](config, reader, precision, device)
    return Decoder(config, weights, precision.dtype, device)
