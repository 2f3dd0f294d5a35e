"""The share of a GPU's memory that the cache takes."""

from collections.abc import Sequence

from nightjar.kernels.device import free_bytes


def cache_budget(device: str, share: float, elsewhere: Sequence[int] = ()) -> int:
    """Return the bytes for keys and values: a share of what is free now, with the model loaded.

    The rest is for the rows of a step, scores and CUDA graphs.

    share: Between 0 and 1, which the settings check.
    elsewhere: Free bytes of the other GPUs. All take as much, so the fullest one decides.
    """
    return int(min([free_bytes(device), *elsewhere]) * share)
