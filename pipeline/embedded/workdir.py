"""The directory in which a run keeps its state, so that running it again goes on."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL

_CHUNK_BYTES = 1 << 20
_WRITTEN = "written.json"


class UsageError(Exception):
    """The arguments cannot be used; the message says which and how to mend them."""


def output_paths(out: Path) -> tuple[Path, Path]:
    """Where successes and failures go: `OUT.jsonl` and `OUT.errors.jsonl`."""
    return out, out.with_name(f"{out.stem}.errors{out.suffix or '.jsonl'}")


def default_workdir(out: Path) -> Path:
    """`OUT.jsonl.work` beside the output."""
    return out.with_name(f"{out.name}.work")


def check_paths(source: Path, out: Path, workdir: Path) -> None:
    """Check what can be checked before any work is done.

    Raises:
        UsageError: The input cannot be read or the output cannot be written.
    """
    if not source.is_file():
        raise UsageError(f"the input {source} is not a file")
    if not os.access(source, os.R_OK):
        raise UsageError(f"the input {source} cannot be read: permission denied")
    if out.is_dir():
        raise UsageError(f"--out {out} is a directory; name a file in it")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no directory {out.parent}; make it first")
    for path in output_paths(out):
        if path.exists() and path.samefile(source):
            raise UsageError(f"--out {out} would overwrite the input {source}")
        if path.exists() and not path.is_file():
            raise UsageError(f"--out {path} is not a regular file")
        if path == workdir:
            raise UsageError(f"--workdir {workdir} is the output; give it a directory of its own")
    if not os.access(out.parent, os.W_OK):
        raise UsageError(f"--out {out}: the directory {out.parent} cannot be written to")


@contextmanager
def locked_workdir(path: Path) -> Iterator[Path]:
    """Make the directory and hold it for this process alone.

    Raises:
        UsageError: It cannot be made, or another run holds it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("w")
    except OSError as error:
        raise UsageError(f"the work directory {path} cannot be used: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another run works in {path}; wait for it, or give this one its own --workdir"
            ) from None
        yield path


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sqlite_url(path: Path) -> str:
    """The database URL of a SQLite file, whatever characters its path holds."""
    return URL.create("sqlite", database=str(path)).render_as_string(hide_password=False)


def note_written(workdir: Path, out: Path) -> None:
    """Remember which files hold the results, so that no other file is taken for them."""
    (workdir / _WRITTEN).write_text(json.dumps(_stamps(out)), encoding="utf-8")


def was_written(workdir: Path, out: Path) -> bool:
    """Whether an earlier run wrote the results, and the files are still as it left them."""
    try:
        noted = json.loads((workdir / _WRITTEN).read_text(encoding="utf-8"))
        return bool(noted == _stamps(out))
    except (FileNotFoundError, ValueError):
        return False


def _stamps(out: Path) -> list[list[str | int]]:
    stamps: list[list[str | int]] = []
    for path in output_paths(out):
        status = path.stat()
        stamps.append([str(path.resolve()), status.st_size, status.st_mtime_ns])
    return stamps
