"""Copies of the tree, so that the checkout is never changed."""

import shutil
import subprocess
from pathlib import Path


def copy_tree(root: Path, target: Path) -> None:
    """Copy what git tracks or would track; links stay links.

    Raises:
        subprocess.CalledProcessError: `root` is no checkout.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source, copy = root / name, target / name
        if source.is_symlink() or source.is_file():  # one may be deleted and not committed
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)


def copy_copy(first: Path, target: Path) -> None:
    """Copy a copy, with the bytecode that its first run has left."""
    shutil.copytree(first, target, symlinks=True, ignore=shutil.ignore_patterns(".hypothesis"))
