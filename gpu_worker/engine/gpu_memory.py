"""The share of a GPU's memory that the cache takes."""

from collections.abc import Sequence

from nightjar.kernels.device import free_bytes


def cache_budget(device: str, share: float, elsewhere: Sequence[int] = ()) -> int:
    """Return the bytes for keys and values: a share of the free memory, with the model loaded.

    elsewhere: free bytes on the other GPUs of a split model, which take as much.

    Raises:
        ValueError: A share that is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"gpu_memory_share {share}: give a number between 0 and 1")
    return int(min([free_bytes(device), *elsewhere]) * share)
