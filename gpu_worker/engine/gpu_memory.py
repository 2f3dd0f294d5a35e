"""The share of a GPU's memory that the cache takes, and what recorded steps hold."""

from collections.abc import Sequence

from nightjar.gpu_worker.engine.config import EngineConfig
from nightjar.gpu_worker.models import Decoder
from nightjar.gpu_worker.models.padded_steps import most_step_bytes
from nightjar.kernels.device import free_bytes


def cache_budget(
    device: str, share: float, elsewhere: Sequence[int] = (), recorded: int = 0
) -> int:
    """Return the bytes for keys and values: a share of what is free now, with the model loaded.

    The rest is for the rows of a step and scores.

    share: Between 0 and 1, which the settings check.
    elsewhere: Free bytes of the other GPUs. All take as much, so the fullest one decides.
    recorded: Bytes that CUDA graphs hold, which the cache leaves free.

    Raises:
        ValueError: The graphs leave nothing.
    """
    free = min([free_bytes(device), *elsewhere])
    if free <= recorded:
        raise ValueError(
            f"{device} has {free} bytes free beside the model, and recorded steps take {recorded}: "
            "set NIGHTJAR_CUDA_GRAPHS=false, or NIGHTJAR_KV_CACHE_BYTES"
        )
    return int((free - recorded) * share)


def recorded_bytes(model: Decoder, config: EngineConfig) -> int:
    """Return at most how many bytes the recorded steps of an engine on a GPU hold."""
    slots = config.slots + config.urgent_slots
    sizes = model.config, model.dtype, model.cache_dtype, slots
    return most_step_bytes(*sizes) if config.cuda_graphs else 0
