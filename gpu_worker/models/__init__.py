"""Decoders that a ModelConfig describes, computed with the ops of `kernels/`."""

from nightjar.gpu_worker.models.adapted import LoraAdapter
from nightjar.gpu_worker.models.batch import Arrivals, KVTensors, TokenBatch
from nightjar.gpu_worker.models.decoder import Decoder
from nightjar.gpu_worker.models.load import load_model

__all__ = [
    "Arrivals",
    "Decoder",
    "KVTensors",
    "LoraAdapter",
    "TokenBatch",
    "load_model",
]
