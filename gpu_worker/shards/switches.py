"""What of the CUDA path this process does without, by settings."""

import logging
from collections.abc import Collection

from nightjar.kernels.device import Switches, choose

logger = logging.getLogger(__name__)


def switch_off(without: Collection[str], window_steps: int, device: str) -> None:
    """Choose the kernels' switches, and log everything on a GPU that is off.

    without: names of process.SWITCHES; window_steps: of the engine, 1 where windows are off.
    """
    choose(
        Switches(
            prefetch="cuda_prefetch" not in without,
            small_products="cuda_small_products" not in without,
            fused_heads="cuda_fused_heads" not in without,
        )
    )
    off = [f"NIGHTJAR_{name.upper()}" for name in without]
    if window_steps == 1:
        off.append("NIGHTJAR_WINDOW_STEPS=1")
    if off and device != "cpu":
        logger.warning(
            "switched off on the GPU: %s", ", ".join(off), extra={"action": "switched_off"}
        )
