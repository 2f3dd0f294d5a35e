"""How much of a GPU's memory the cache may take."""

import torch


def cache_budget(device: str, share: float) -> int:
    """Bytes for keys and values: a share of what is free now, with the model loaded.

    Raises:
        ValueError: A share that is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"gpu_memory_share {share}: give a number between 0 and 1")
    torch.cuda.empty_cache()  # what loading took in passing is free, too
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * share)
