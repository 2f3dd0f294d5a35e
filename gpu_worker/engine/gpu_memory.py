"""How much of a GPU's memory the cache may take."""

from collections.abc import Sequence

import torch


def cache_budget(device: str, share: float, elsewhere: Sequence[int] = ()) -> int:
    """Bytes for keys and values: a share of what is free now, with the model loaded.

    elsewhere: what is free on the other GPUs that take as much, each for its own part.

    Raises:
        ValueError: A share that is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"gpu_memory_share {share}: give a number between 0 and 1")
    return int(min([free_bytes(device), *elsewhere]) * share)


def free_bytes(device: str) -> int:
    """What a GPU has left."""
    torch.cuda.empty_cache()  # what loading took in passing is free, too
    free, _ = torch.cuda.mem_get_info(device)
    return free
