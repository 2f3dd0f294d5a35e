"""Digests of large files, remembered in the user's cache folder between starts.

A file counts as unchanged while its path, size, times and inode are equal. The time of its last
change of status is among them, which no program can set back. Where a folder cannot be written or
an entry cannot be read, the file is hashed.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from nightjar.checkpoints.errors import CheckpointError

# A file system's clock cannot tell two changes within so many nanoseconds apart.
_GRAIN_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class FileStamp:
    """The file system's marks of a file's content."""

    size_bytes: int
    modified_ns: int
    changed_ns: int
    inode: int

    @staticmethod
    def of(path: Path) -> FileStamp | None:
        """Return a file's stamp; None if there is no such file.

        Raises:
            CheckpointError: The file system does not give it.
        """
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        return FileStamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def cache_folder() -> Path | None:
    """Where digests are kept: below $XDG_CACHE_HOME or ~/.cache; None without a home."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111
    return root / "nightjar" / "fingerprints" if root.is_absolute() else None


def recall(path: Path) -> str | None:
    """Return the digest of the file in its present state, if it is remembered."""
    entry = _entry(path)
    try:
        noted = json.loads(entry.read_bytes()) if entry is not None else None
        stamp = FileStamp.of(path)
        if isinstance(noted, dict) and stamp is not None and noted.get("stamp") == asdict(stamp):
            return str(noted["digest"])
    except (OSError, ValueError, KeyError):
        pass
    return None


def remember(path: Path, stamp: FileStamp, digest: str, read_from_ns: int) -> None:
    """Keep the digest of a file whose stamp was taken before reading it.

    `read_from_ns` is the moment (of the wall clock) at which reading began. The digest of a file
    that changed just before is not kept: it may change again with the same stamp.
    """
    entry = _entry(path)
    if entry is None or max(stamp.modified_ns, stamp.changed_ns) > read_from_ns - _GRAIN_NS:
        return
    if FileStamp.of(path) != stamp:
        return
    noted = {"path": str(path.resolve()), "stamp": asdict(stamp), "digest": digest}
    try:
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False) as file:
            json.dump(noted, file)
        os.replace(file.name, entry)  # noqa: PTH105 - atomic
    except OSError:
        pass


def _entry(path: Path) -> Path | None:
    """Return the path of the entry for this file."""
    folder = cache_folder()
    if folder is None:
        return None
    return folder / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"
