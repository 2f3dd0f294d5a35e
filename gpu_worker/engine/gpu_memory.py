"""How much of a GPU's memory the cache may take."""

from collections.abc import Sequence

from nightjar.kernels.device import free_bytes


def cache_budget(device: str, share: float, elsewhere: Sequence[int] = ()) -> int:
    """Bytes for keys and values: a share of what is free now, with the model loaded.

    elsewhere: what is free on the other GPUs that take as much, each for its own part.

    Raises:
        ValueError: A share that is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"gpu_memory_share {share}: give a number between 0 and 1")
    return int(min([free_bytes(device), *elsewhere]) * share)
