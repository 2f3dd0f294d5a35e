"""The fingerprint of a model directory: it differs wherever the files' content differs.

Every byte counts. Hashing takes about a second for a GiB on one core. So several threads hash
pieces of files, because hashlib releases the interpreter lock. The digest of a large file is
remembered while the file is unchanged.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nightjar.checkpoints.digest_cache import FileStamp, recall, remember
from nightjar.checkpoints.errors import CheckpointError
from nightjar.checkpoints.precision_plan import PLAN_NAME

logger = logging.getLogger(__name__)

# Files that answers depend on, beside the weights; generation_config.json holds the end-of-text
# tokens, the two before the plan hold the chat template.
SMALL_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    PLAN_NAME,
)

PIECE_BYTES = 64 << 20
"""Bytes of a piece; a fingerprint depends on it, and on the hash and the order of files."""
READ_BYTES = 1 << 20
REMEMBERED_BYTES = 64 << 20
"""The digest of a smaller file is not remembered: hashing it is fast enough."""
MOST_THREADS = 16


def stamps(paths: Iterable[Path]) -> tuple[FileStamp | None, ...]:
    """Return each file's stamp, without reading it; None for a missing file.

    Raises:
        CheckpointError: The file system does not give a file's stamp.
    """
    return tuple(FileStamp.of(path) for path in paths)


def fingerprint(
    directory: Path, weight_files: Sequence[Path], small_names: Sequence[str] = SMALL_NAMES
) -> str:
    """Return the sha256, in hexadecimal, over each file's name, size and content.

    small_names: the other files that count, where they are there.

    Raises:
        CheckpointError: A file cannot be read, or changes meanwhile.
    """
    small = [directory / name for name in small_names if (directory / name).is_file()]
    files = [*small, *weight_files]
    before = stamps(files)
    whole = hashlib.sha256(b"nightjar fingerprint 2\0")
    started_ns = time.time_ns()
    try:
        for path, digest in zip(files, _digests(files), strict=True):
            whole.update(f"{path.name}\0{digest}\0".encode())
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error}") from error
    if stamps(files) != before:
        raise CheckpointError(
            f"{directory}: files change while they are read; wait until they are all there"
        )
    total_bytes = sum(stamp.size_bytes for stamp in before if stamp is not None)
    logger.info(
        "%s is the model %s: read %.1f GiB in %.1f s",
        directory,
        whole.hexdigest()[:12],
        total_bytes / 2**30,
        (time.time_ns() - started_ns) / 1e9,
        extra={"action": "fingerprint"},
    )
    return whole.hexdigest()


def _digests(files: Sequence[Path]) -> list[str]:
    """Return the digest of each file, remembered or computed now."""
    known = [recall(path) if path.stat().st_size >= REMEMBERED_BYTES else None for path in files]
    unknown = [path for path, digest in zip(files, known, strict=True) if digest is None]
    made = dict(zip(unknown, _hash_files(unknown), strict=True))
    return [digest or made[path] for path, digest in zip(files, known, strict=True)]


def _hash_files(files: Sequence[Path]) -> list[str]:
    """Return the digest of each file's size and of the digests of its pieces."""
    looked = [FileStamp.of(path) for path in files]
    starts = [range(0, max(1, path.stat().st_size), PIECE_BYTES) for path in files]
    started_ns = time.time_ns()
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        pieces = [
            [pool.submit(hash_piece, path, start) for start in of_file]
            for path, of_file in zip(files, starts, strict=True)
        ]
        digests = []
        for path, stamp, of_file in zip(files, looked, pieces, strict=True):
            whole = hashlib.sha256(path.stat().st_size.to_bytes(8, "big"))
            for piece in of_file:
                whole.update(piece.result())
            digests.append(whole.hexdigest())
            if stamp is not None and stamp.size_bytes >= REMEMBERED_BYTES:
                remember(path, stamp, digests[-1], started_ns)
    return digests


def hash_piece(path: Path, start: int) -> bytes:
    """Return the digest of at most PIECE_BYTES of a file."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(READ_BYTES))
    left = PIECE_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[: min(left, READ_BYTES)])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()
