"""Where kernels are kept that were compiled on this machine, for its processor or its GPU."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$NIGHTJAR_KERNEL_CACHE, else a folder of the user's cache: $XDG_CACHE_HOME or ~/.cache."""
    if named := os.environ.get("NIGHTJAR_KERNEL_CACHE"):
        return Path(named)
    # Without a home directory expanduser leaves the ~, where Path.home() would raise.
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(root) / "nightjar" / "kernels"
