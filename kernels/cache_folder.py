"""The folder of kernels that were compiled for this machine's processor or GPU."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$NIGHTJAR_KERNEL_CACHE, else a folder of the user's cache: $XDG_CACHE_HOME or ~/.cache."""
    if named := os.environ.get("NIGHTJAR_KERNEL_CACHE"):
        return Path(named)
    # Without a home directory expanduser leaves the ~, but Path.home() raises.
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(root) / "nightjar" / "kernels"
