"""The directory in which a run keeps its state, so that the same command resumes it."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import URL

from nightjar.jobs.records import Job

_WRITTEN = "written.json"
_ASKED = "asked.json"
_SPEED = "speed.json"
_DELIVERED = "delivered.txt"
_DATABASE = "nightjar.db"
_MANY = "the prompt vectors"
_IN_WRITING = (-1, -1)  # in the place of size and time

_Stamp = list[str | int]  # path, size, time of the last change


class UsageError(Exception):
    """The arguments cannot be used; the message says which and how to correct them."""


def output_paths(out: Path) -> tuple[Path, Path]:
    """Return the files of successes and failures: `OUT.jsonl` and `OUT.errors.jsonl`."""
    return out, out.with_name(f"{out.stem}.errors{out.suffix or '.jsonl'}")


def default_workdir(out: Path) -> Path:
    """`OUT.jsonl.work` beside the output."""
    return out.with_name(f"{out.name}.work")


def check_paths(source: Path, out: Path, workdir: Path) -> None:
    """Check the arguments before any work is done.

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
    """Make the directory and lock it for this process.

    Raises:
        UsageError: The directory cannot be made, or another run has locked it.
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
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sqlite_url(path: Path) -> str:
    """Return the database URL of a SQLite file; its path may hold any characters."""
    return URL.create("sqlite", database=str(path)).render_as_string(hide_password=False)


def check_overwrites(out: Path, workdir: Path) -> None:
    """Refuse to replace an output file that no run in `workdir` has written.

    An empty file may be replaced, and so may a file that is as such a run has written it.

    Raises:
        UsageError: A file would be lost; the message names it.
    """
    noted = _noted(workdir)
    for path in output_paths(out):
        if not path.exists() or path.stat().st_size == 0:
            continue
        found = _stamp(path)
        if found in noted or [found[0], *_IN_WRITING] in noted:
            continue
        what = "no run of this work directory has written it"
        if found[0] in [stamp[0] for stamp in noted]:
            what = "it has been changed since Nightjar wrote it"
        raise UsageError(
            f"--out would overwrite {path}, and {what}: move it away, name another --out, or add "
            "--overwrite to replace it"
        )


def note_asked(workdir: Path, asked: Mapping[str, str]) -> None:
    """Note what the run of this directory computes, by the names that the user knows."""
    (workdir / _ASKED).write_text(json.dumps(asked), encoding="utf-8")


def noted_asked(workdir: Path) -> dict[str, str]:
    """Return what `note_asked` has noted; empty where the note is missing or cut off."""
    try:
        noted = json.loads((workdir / _ASKED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}


def forget_state(workdir: Path) -> None:
    """Remove what a finished run has kept; its speed, its logs and what it wrote stay."""
    for path in (*workdir.glob(f"{_DATABASE}*"), workdir / _ASKED, workdir / _DELIVERED):
        path.unlink(missing_ok=True)


def note_delivered(workdir: Path, results: str) -> None:
    """Note which results are where the user wants them."""
    (workdir / _DELIVERED).write_text(results, encoding="utf-8")


def were_delivered(workdir: Path, results: str) -> bool:
    """Whether `note_delivered` was told of these results last."""
    try:
        return (workdir / _DELIVERED).read_text(encoding="utf-8") == results
    except (OSError, UnicodeDecodeError):
        return False


def database_path(workdir: Path) -> Path:
    """Return the SQLite file of a run."""
    return workdir.resolve() / _DATABASE


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast the last run of a work directory was.

    seconds: Without loading the model.
    tokens: Of the prompts and answers of all its requests.
    reused: How many of its answers were known before, and took no time.
    """

    requests: int
    seconds: float
    tokens: int
    reused: int = 0


def note_speed(workdir: Path, job: Job, requests: int, seconds: float) -> None:
    """Note how fast a run was, for `nightjar plan`."""
    share = requests / max(job.ended, 1)
    tokens = round((job.prompt_tokens + job.completion_tokens) * share)
    reused = min(requests, round(job.reused * share))
    speed = Speed(requests, max(seconds, 1e-3), tokens, reused)
    (workdir / _SPEED).write_text(json.dumps(asdict(speed)), encoding="utf-8")


def last_speed(workdir: Path) -> Speed | None:
    """Return how fast the last run was; None where that is not known."""
    try:
        return Speed(**json.loads((workdir / _SPEED).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def what_changed(workdir: Path, asked: Mapping[str, str]) -> str:
    """Return what has changed since the run of this directory began."""
    try:
        before = json.loads((workdir / _ASKED).read_text(encoding="utf-8"))
        changed = [name for name, value in asked.items() if before[name] != value]
    except (OSError, ValueError, TypeError, KeyError):  # earlier versions wrote none
        changed = []
    return names_changed(changed) if changed else names_changed(list(asked), " or ")


def names_changed(names: Sequence[str], between: str = " and ") -> str:
    """Return a sentence about what has changed."""
    is_one = len(names) == 1 and [*names] != [_MANY]
    told = f"{', '.join(names[:-1])}{between if names[1:] else ''}{names[-1]}"
    return f"{told} {'has' if is_one else 'have'} changed since"


def note_writing(workdir: Path, out: Path) -> None:
    """Note which files are about to be replaced, so that a killed run's files are recognised."""
    paths = [str(path.resolve()) for path in output_paths(out)]
    _note(workdir, [[path, *_IN_WRITING] for path in paths])


def note_written(workdir: Path, out: Path) -> None:
    """Note which files hold the results, so that no other file is taken for them."""
    _note(workdir, _stamps(out))


def was_written(workdir: Path, out: Path) -> bool:
    """Whether an earlier run wrote the results, and the files are still as it left them."""
    try:
        return _noted(workdir) == _stamps(out)
    except FileNotFoundError:
        return False


def _note(workdir: Path, stamps: list[_Stamp]) -> None:
    (workdir / _WRITTEN).write_text(json.dumps(stamps), encoding="utf-8")


def _noted(workdir: Path) -> list[_Stamp]:
    """Return the stamps of the last note; none where the note is missing or cut off."""
    try:
        noted = json.loads((workdir / _WRITTEN).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return []
    return noted if isinstance(noted, list) else []


def _stamps(out: Path) -> list[_Stamp]:
    return [_stamp(path) for path in output_paths(out)]


def _stamp(path: Path) -> _Stamp:
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]
