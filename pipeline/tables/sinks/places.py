"""Where the files of a sink go: a path of this machine, or an object of an object store."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from nightjar.pipeline.tables.sinks.sink import SinkRefusedError
from nightjar.pipeline.tables.sinks.swapping import (
    PlaceTakenError,
    restore,
    swapped_when_whole,
    try_building,
)

FREE_BYTES = 32 << 20


class Place(Protocol):
    """Where one file or folder goes."""

    @property
    def name(self) -> str:
        """For messages."""

    def check(self) -> None:
        """Refuse a place that cannot be written; raises SinkRefusedError."""

    def replaced(self) -> AbstractContextManager[Path]:
        """Give a local path at which to build what appears here when the block ends well."""


class LocalPlace:
    """A file or folder of this machine.

    Args:
        path: The file or the folder.
        folder: Whether it is a folder.
        check_replaced: Refuses what is there, by raising SinkRefusedError.
    """

    def __init__(self, path: Path, folder: bool, check_replaced: Callable[[Path], None]) -> None:
        self._path = path
        self._folder = folder
        self._check_replaced = check_replaced
        self.name = f"{path}/" if folder else str(path)

    def check(self) -> None:
        """Refuse a place that cannot be written, is full, or holds something else."""
        path = self._path
        if path.exists() and path.is_dir() != self._folder:
            kind, other = ("folder", "file") if self._folder else ("file", "folder")
            raise SinkRefusedError(f"{self.name} should be a {kind}, and is a {other}; rename it")
        if path.exists() and not self._folder and not path.is_file():
            raise SinkRefusedError(f"{path} is no regular file; name another path")
        if not path.resolve().parent.is_dir():
            raise SinkRefusedError(f"there is no folder {path.resolve().parent}; make it first")
        try:
            restore(path.resolve())
            if path.exists():
                self._check_replaced(path)
            try_building(path.resolve(), folder=self._folder)
            check_room(path.resolve().parent)
        except PlaceTakenError as error:
            raise SinkRefusedError(f"{error}; wait for it") from error
        except OSError as error:
            raise SinkRefusedError(
                f"{self.name} cannot be written: {error.strerror or error}; correct its rights, "
                "or name another path"
            ) from error

    def replaced(self) -> AbstractContextManager[Path]:
        """Give a path beside the place; its content replaces the place as a whole."""
        return swapped_when_whole(self._path, folder=self._folder)


class ObjectPlace:
    """An object of an object store. It is built here, and uploaded when it is whole.

    The store shows an object when its upload is complete, and the old one until then.
    """

    def __init__(self, url: str, check_replaced: Callable[[pa.NativeFile], None]) -> None:
        self._url = url
        self.name = shown(url)
        self._check_replaced = check_replaced

    def check(self) -> None:
        """Refuse a store that cannot be reached or written, and an object that is not ours."""
        try:
            store, path = self._store()
            if store.get_file_info(path).type == fs.FileType.File:
                with store.open_input_file(path) as stream:
                    self._check_replaced(stream)
            # The right to write shows only in writing.
            probe = f"{path}.nightjar-probe"
            with store.open_output_stream(probe) as stream:
                stream.write(b"")
            store.delete_file(probe)
        except (OSError, pa.ArrowException) as error:
            raise SinkRefusedError(
                f"{self.name} cannot be written: {_first_line(error)}; check the bucket, its "
                "rights and the credentials of the environment"
            ) from error

    @contextmanager
    def replaced(self) -> Iterator[Path]:
        """Give a path of a temporary folder; its file is uploaded as a whole."""
        with tempfile.TemporaryDirectory(prefix="nightjar-sink-") as folder:
            local = Path(folder, "object")
            yield local
            store, path = self._store()
            fs.copy_files(str(local), path, fs.LocalFileSystem(), store)

    def _store(self) -> tuple[fs.FileSystem, str]:
        found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(self._url)
        return found


def shown(url: str) -> str:
    """The URL of an object for messages, without options and credentials."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def check_room(folder: Path) -> None:
    """Refuse a folder whose disk is full; raises SinkRefusedError, or OSError."""
    free = shutil.disk_usage(folder).free
    if free < FREE_BYTES:
        raise SinkRefusedError(
            f"the disk of {folder} is full ({free >> 20} MiB free, at least {FREE_BYTES >> 20} "
            "needed); free some"
        )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
