"""The parts of the CUDA path that a process does not use, by its settings."""

import logging

from nightjar.compute_config import ComputeConfig
from nightjar.kernels.device import Switches, choose

logger = logging.getLogger(__name__)


def apply_switches(config: ComputeConfig, device: str, rank: int) -> None:
    """Choose the kernels' switches; on a GPU, log everything that is off."""
    choose(
        Switches(
            prefetch=config.cuda_prefetch,
            small_products=config.cuda_small_products,
            fused_heads=config.cuda_fused_heads,
        )
    )
    off = [f"NIGHTJAR_{name.upper()}" for name in config.switched_off]
    if config.window_steps == 1 and rank == 0:  # only rank 0 counts the steps of a window
        off.append("NIGHTJAR_WINDOW_STEPS=1")
    if off and device != "cpu":
        logger.warning(
            "switched off on the GPU: %s", ", ".join(off), extra={"action": "switched_off"}
        )
