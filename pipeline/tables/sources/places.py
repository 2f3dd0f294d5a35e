"""Where the files of a source are: a file or a folder, on this machine or in S3.

The list of files is made once. A file that appears later is not read, and a file that changes
while the source is read is an error.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from nightjar.pipeline.tables.sources.piece import SourceError

MOST_FILES = 100_000
_S3 = "s3://"


@dataclass(frozen=True, slots=True)
class S3Options:
    """How an S3 service is reached; None leaves it to the usual AWS variables and files."""

    endpoint: str | None = None
    region: str | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a source, as they were when it was opened.

    given: The place as the user wrote it, for messages.
    base: The folder; of a single file its own folder.
    """

    given: str
    filesystem: pafs.FileSystem
    base: str
    files: tuple[pafs.FileInfo, ...]

    @property
    def is_remote(self) -> bool:
        """Whether reading goes over the network."""
        return not isinstance(self.filesystem, pafs.LocalFileSystem)

    def name(self, info: pafs.FileInfo) -> str:
        """Return the file's path below the place that the user named, for messages."""
        path: str = info.path
        if len(self.files) == 1 and not path.startswith(f"{self.given}/"):
            return self.given
        return f"{self.given.rstrip('/')}/{path[len(self.base) :].lstrip('/')}"

    def digest(self) -> str:
        """Return a digest of the names, sizes and times of change of all files."""
        told = hashlib.sha256()
        for info in self.files:
            below = info.path[len(self.base) :]
            told.update(f"{below}\0{info.size}\0{info.mtime_ns}\n".encode())
        return told.hexdigest()

    def check_unchanged(self, info: pafs.FileInfo) -> None:
        """Raise SourceError if the file is gone, or is not as it was listed."""
        now = self.filesystem.get_file_info(info.path)
        if now.type != pafs.FileType.File:
            raise SourceError(f"{self.name(info)} is gone since the run began; put it back")
        if (now.size, now.mtime_ns) != (info.size, info.mtime_ns):
            raise SourceError(
                f"{self.name(info)} has changed since the run began; run again while nobody writes"
            )

    def open_text(self, info: pafs.FileInfo) -> pa.NativeFile:
        """Open a file of text as a stream of bytes; `.gz`, `.zst` and the like are unpacked."""
        self.check_unchanged(info)
        try:
            return self.filesystem.open_input_stream(info.path, compression="detect")
        except (OSError, pa.ArrowException) as error:
            raise SourceError(f"{self.name(info)}: {plain(error)}") from error


def list_files(
    given: str, folder: Path, suffixes: Sequence[str], s3: S3Options | None = None
) -> Listing:
    """List the files of a place.

    Args:
        given: A path, relative to `folder`, or an `s3://` URL; a file or a folder.
        folder: The folder of the task file.
        suffixes: In a folder, files with other endings are not read.
        s3: How an `s3://` place is reached.

    Raises:
        SourceError: There is no such place, or no file in it.
    """
    filesystem, path = open_place(given, folder, s3)
    try:
        found = filesystem.get_file_info(path)
        if found.type == pafs.FileType.File:
            return Listing(given, filesystem, path.rpartition("/")[0], (found,))
        if found.type == pafs.FileType.NotFound:
            raise SourceError(f"{given}: there is no such file or folder")
        inside = filesystem.get_file_info(pafs.FileSelector(path, recursive=True))
    except (OSError, pa.ArrowException) as error:
        raise SourceError(f"{given}: {plain(error)}") from error
    files = [info for info in inside if _is_data(info, path, suffixes)]
    if not files:
        raise SourceError(f"{given}: the folder holds no file that ends with {suffixes[0]}")
    if len(files) > MOST_FILES:
        raise SourceError(f"{given}: the folder holds {len(files)} files, more than {MOST_FILES}")
    return Listing(given, filesystem, path, tuple(sorted(files, key=lambda info: info.path)))


def open_place(
    given: str, folder: Path, s3: S3Options | None = None
) -> tuple[pafs.FileSystem, str]:
    """Return the file system of a place, and the path in it.

    Raises:
        SourceError: The place cannot be used.
    """
    if not given.startswith(_S3):
        if re.match(r"[a-z0-9]+://", given):
            scheme = given.partition("://")[0]
            raise SourceError(f"{scheme}:// is not supported; give a path or an s3:// URL")
        return pafs.LocalFileSystem(), str((folder / Path(given).expanduser()).resolve())
    if "@" in urlsplit(given).netloc:
        # Not the URL itself: it holds a secret.
        raise SourceError(
            "an s3:// URL must not hold a key; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    options: dict[str, str] = {}
    if s3 is not None and s3.endpoint is not None:
        parts = urlsplit(s3.endpoint if "//" in s3.endpoint else f"https://{s3.endpoint}")
        options |= {"endpoint_override": parts.netloc, "scheme": parts.scheme}
    if s3 is not None and s3.region is not None:
        options["region"] = s3.region
    url = given.rstrip("/")
    if options:
        url += f"{'&' if '?' in url else '?'}{urlencode(options)}"
    try:
        found: tuple[pafs.FileSystem, str] = pafs.FileSystem.from_uri(url)
    except (OSError, pa.ArrowException, ImportError) as error:
        raise SourceError(f"{given}: {plain(error)}") from error
    return found


def plain(error: Exception) -> str:
    """Return an error of Arrow in one line."""
    told = getattr(error, "strerror", None) or str(error)
    return " ".join(told.split())[:300].rstrip(".")


def _is_data(info: pafs.FileInfo, base: str, suffixes: Sequence[str]) -> bool:
    """Whether a file of a folder is read; names that begin with `.` or `_` are left out."""
    parts = info.path[len(base) :].strip("/").split("/")
    hidden = any(part.startswith((".", "_")) for part in parts)
    return (
        info.type == pafs.FileType.File
        and not hidden
        and parts[-1].lower().endswith(tuple(suffixes))
    )
