"""A file or folder that is built beside its place, and moved there when it is whole.

A reader finds the old one or the new one. What a killed process has left beside the place is
removed by the next one that builds there.
"""

import ctypes
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_FDCWD = -100
_READERS_S = 0.5


class PlaceTakenError(Exception):
    """Another process builds the same file or folder now."""


@contextmanager
def swapped_when_whole(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """Give the path at which to build; when the block ends well, it replaces `path`.

    Everything is on the disk before it becomes visible. An error in the block leaves `path` as it
    was. The file that is given exists and is empty; so does the folder.

    Raises:
        PlaceTakenError: Another process builds here.
        OSError: The disk is full, or rights are missing.
    """
    path = path.resolve()  # a link stays a link: its target is replaced
    building = _building(path)
    restore(path)
    handle = _locked(building, folder)
    try:
        if folder:
            _empty(building)
        else:
            os.ftruncate(handle, 0)
        try:
            yield building
            _sync(building)
            _swap(building, path)
        except BaseException:
            _remove(building)
            raise
        _sync_entry(path.parent)
        if folder:
            _remove_old(building)  # after the exchange it is the old one
    finally:
        os.close(handle)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file for the length of the block; raises PlaceTakenError."""
    handle = _locked(path, folder=False)
    try:
        yield
    finally:
        _remove(path)
        os.close(handle)


def try_building(path: Path, *, folder: bool) -> None:
    """Build something beside `path`, and take it away again; raises as `swapped_when_whole`."""
    building = _building(path)
    handle = _locked(building, folder)
    try:
        _remove(building)
    finally:
        os.close(handle)


def restore(path: Path) -> None:
    """Finish what a process did that was killed between two renames of `_swap_slowly`."""
    old = _old(path)
    if old.is_dir() and not path.exists():
        old.rename(path)


def _locked(building: Path, folder: bool) -> int:
    """Make the file or folder and lock it; the lock ends with the process."""
    while True:
        if folder:
            building.mkdir(exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY if folder else os.O_RDWR | os.O_CREAT
        handle = os.open(building, flags | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one who had it may have moved it to its place meanwhile.
            if os.path.samestat(os.fstat(handle), building.stat()):
                return handle
        except BlockingIOError:
            os.close(handle)
            raise PlaceTakenError(f"another run writes to {building}") from None
        except FileNotFoundError:
            pass
        os.close(handle)


def _swap(building: Path, path: Path) -> None:
    if not building.is_dir() or not path.exists():
        building.replace(path)
    elif not _exchange(building, path):
        _swap_slowly(building, path)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    status: int = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE)
    return status == 0


def _swap_slowly(building: Path, path: Path) -> None:
    """Two renames: for a moment there is no folder. `restore` mends a kill in that moment."""
    old = _old(path)
    if old.exists():
        shutil.rmtree(old)
    path.rename(old)
    building.rename(path)
    _remove_old(old)


def _remove_old(folder: Path) -> None:
    """Remove a folder that was replaced, when those who have just listed it have its files open."""
    if folder.is_dir():
        time.sleep(_READERS_S)
        _remove(folder)


def _building(path: Path) -> Path:
    return path.with_name(f".{path.name}.nightjar-new")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.nightjar-old")


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        _remove(entry)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
        return
    with suppress(FileNotFoundError):
        path.unlink()


def _sync(path: Path) -> None:
    """Bring a file, or a folder with all that is in it, to the disk."""
    if path.is_dir():
        for root, _, files in os.walk(path):
            for name in files:
                _sync_entry(Path(root, name))
            _sync_entry(Path(root))
    else:
        _sync_entry(path)


def _sync_entry(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
