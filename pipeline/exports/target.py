"""Where an export goes: a folder of this machine, or a prefix of an object store."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

OBJECT_STORES = ("s3://", "gs://")
_BUILDING = ".nightjar-export-"
_LOCK = ".nightjar-export.lock"


class TargetError(Exception):
    """The target cannot be used; the message says why, and how to mend it."""


class Target(Protocol):
    """Files by their names; a file is seen when it is whole, and not before."""

    name: str

    def held(self) -> AbstractContextManager[None]:
        """Keep other exports of this machine out; raises TargetError if there is one."""

    def read(self, name: str) -> bytes | None:
        """A small file; None if it is not there."""

    def size(self, name: str) -> int | None:
        """The bytes of a file; None if it is not there."""

    def made(self, name: str) -> AbstractContextManager[Path]:
        """Give a path at which to build a file, which appears when the block ends well."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""


def target_of(place: str) -> Target:
    """The target that a path or a URL names.

    Raises:
        TargetError: It cannot be one.
    """
    if place.startswith(OBJECT_STORES):
        from nightjar.pipeline.exports.objects import ObjectTarget  # noqa: PLC0415 - pyarrow

        return ObjectTarget(place.rstrip("/"))
    if "://" in place:
        raise TargetError(f"{place}: name a folder, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX")
    return FolderTarget(Path(place))


class FolderTarget:
    """A folder, which is made where it is missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.name = f"{folder}/"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold a lock on the folder, and remove what a killed export was building."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / _LOCK).open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TargetError(
                    f"another export writes into {self.name}; wait for it, or name another folder"
                ) from error
            for left in [
                *self._folder.glob(f"{_BUILDING}*"),
                *self._folder.glob(f"*/{_BUILDING}*"),
            ]:
                left.unlink(missing_ok=True)
            yield  # the lock's file stays: who has opened it meanwhile must not lock another one

    def read(self, name: str) -> bytes | None:
        """As Target says."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def size(self, name: str) -> int | None:
        """As Target says."""
        try:
            return (self._folder / name).stat().st_size
        except FileNotFoundError:
            return None

    @contextmanager
    def made(self, name: str) -> Iterator[Path]:
        """Build beside the place; what is there when the block ends is on the disk."""
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        building = path.with_name(f"{_BUILDING}{secrets.token_hex(8)}")
        try:
            yield building
            _sync(building)
            building.replace(path)
            _sync(path.parent)
        except BaseException:
            building.unlink(missing_ok=True)
            raise

    def remove(self, name: str) -> None:
        """As Target says."""
        (self._folder / name).unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
