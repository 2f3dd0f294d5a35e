"""Uploads of files: a form is parsed and its file stored while they arrive, in bounded memory."""

import asyncio
import hashlib
import logging
import unicodedata
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import PurePosixPath

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from nightjar.jobs.api.body import (
    RefusedRequestError,
    UploadLimits,
    announced_bytes,
    refuse_compressed,
    refuse_too_large,
)
from nightjar.jobs.api.forms import FILE_FIELD, MAX_OVERHEAD_BYTES, UploadForm, missing
from nightjar.jobs.api.places import UploadPlaces
from nightjar.jobs.errors import StoreError
from nightjar.jobs.file_records import (
    BEAT_EVERY_S,
    PART_BYTES,
    FilePurpose,
    NewFile,
    StoredFile,
)
from nightjar.jobs.lines.file_kinds import HEAD_BYTES, other_format
from nightjar.jobs.store.files import Files

logger = logging.getLogger(__name__)

PURPOSE, ANCHOR, SECONDS = "purpose", "expires_after[anchor]", "expires_after[seconds]"
CREATED_AT = "created_at"
SHORTEST_LIFE_S, LONGEST_LIFE_S = 3_600, 2_592_000  # as OpenAI's: an hour to 30 days
MAX_FILENAME = 255  # characters
_UNNAMED = "upload"
# Control characters, half characters, line ends, and marks that turn the direction of writing.
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})
_UNSAFE_CHARACTERS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class FileUploads:
    """Receives files; a part of 1 MiB is stored as soon as it has arrived."""

    def __init__(self, files: Files, limits: UploadLimits, places: UploadPlaces) -> None:
        self._files = files
        self._limits = limits
        self._places = places

    async def receive(self, request: Request, tenant: str) -> StoredFile:
        """Store the file of a form for a tenant; raises RefusedRequestError."""
        form = self._form(request)
        arriving = ArrivingFile(self._files, tenant, form, self._limits)
        await run_in_threadpool(arriving.check_quota, _least_bytes(request))
        pieces = self._places.pieces(request)
        # Who sends a little at a time, or little in all, holds no place before it is here.
        first = await anext(pieces)
        async with self._places.place(), _kept_alive(arriving):
            await run_in_threadpool(arriving.take, first)
            async for piece in pieces:
                await run_in_threadpool(arriving.take, piece)
            stored = await run_in_threadpool(arriving.end)
        extra = {"action": "file_stored", "file_id": stored.id, "bytes": stored.bytes}
        logger.info("file stored", extra=extra)
        return stored

    def _form(self, request: Request) -> UploadForm:
        """The form that will arrive, if its headers are in order."""
        refuse_compressed(request.headers, "the form")
        form = UploadForm(request.headers.get("content-type", ""), (PURPOSE, ANCHOR, SECONDS))
        refuse_too_large(request.headers, self._limits)
        return form


class ArrivingFile:
    """A file while its form arrives; not safe for use by two threads, but for `beat`."""

    def __init__(self, files: Files, tenant: str, form: UploadForm, limits: UploadLimits) -> None:
        self._files = files
        self._tenant = tenant
        self._form = form
        self._limits = limits
        self._file_id: str | None = None
        self._parts = 0
        self._size = 0
        self._digest = hashlib.sha256()

    def take(self, piece: bytes) -> None:
        """Parse a piece of the form, and store the parts that are full; raises JobError."""
        self._form.feed(piece)
        check_purpose(self._form.fields)
        while len(self._form.data) >= PART_BYTES:
            self._store()

    def end(self) -> StoredFile:
        """Store the rest and make the file visible; raises JobError."""
        self._form.check_complete()
        if PURPOSE not in self._form.fields:
            raise missing(PURPOSE)
        life_s = parse_life(self._form.fields, self._limits.file_lifetime_s)
        if self._form.data:
            self._store()
        if self._file_id is None:
            raise RefusedRequestError(400, "empty_file", "the file is empty", FILE_FIELD)
        return self._files.end(self._file_id, self._size, self._digest.hexdigest(), life_s)

    def beat(self) -> None:
        """Show that the upload goes on; raises StoreError."""
        if self._file_id is not None:
            self._files.beat(self._file_id)

    def give_up(self) -> None:
        """Leave what was stored to the sweeper."""
        if self._file_id is None:
            return
        try:
            self._files.abandon(self._file_id)
        except StoreError:  # the sweeper sees that nothing moves
            logger.warning("an upload is not given up", extra={"action": "give_up_failed"})

    def check_quota(self, size: int) -> None:
        """Raise RefusedRequestError if the tenant may not store so many bytes more."""
        if size > 0 and not self._limits.may_store(self._tenant, size):
            raise RefusedRequestError(
                403,
                "storage_quota_exceeded",
                "the bytes that you may store are used up; delete files, or wait until they expire",
            )

    def _store(self) -> None:
        data = self._form.take(PART_BYTES)
        self.check_quota(len(data))
        if self._file_id is None:
            if (fault := other_format(data[:HEAD_BYTES])) is not None:
                message = f"the file {fault}"
                raise RefusedRequestError(400, "not_batch_lines", message, FILE_FIELD)
            self._file_id = self._files.begin(
                NewFile(self._tenant, safe_filename(self._form.filename or ""))
            )
        self._digest.update(data)
        self._files.append(self._file_id, self._parts, data)
        self._parts += 1
        self._size += len(data)


def check_purpose(fields: dict[str, str]) -> None:
    """Raise RefusedRequestError if the form names a purpose that is not that of a batch's input."""
    purpose = fields.get(PURPOSE, FilePurpose.BATCH)
    if purpose == FilePurpose.BATCH:
        return
    why = f"{purpose[:64]!r} is not supported"
    if purpose == FilePurpose.BATCH_OUTPUT:
        why = f"{purpose!r} is the purpose of files that a batch writes"
    message = f"{why}; upload with the purpose {FilePurpose.BATCH.value!r}"
    raise RefusedRequestError(400, "invalid_purpose", message, PURPOSE)


def parse_life(fields: dict[str, str], default_s: float) -> float:
    """How long the file is to live, in seconds; raises RefusedRequestError."""
    anchor, seconds = fields.get(ANCHOR), fields.get(SECONDS)
    if anchor is None and seconds is None:
        return default_s
    if anchor != CREATED_AT:
        message = f"must be {CREATED_AT!r}, beside expires_after[seconds]"
        raise RefusedRequestError(400, "invalid_expires_after", f"{ANCHOR} {message}", ANCHOR)
    digits = (seconds or "")[:20]
    life_s = int(digits) if digits.isascii() and digits.isdecimal() else 0
    if not SHORTEST_LIFE_S <= life_s <= LONGEST_LIFE_S:
        message = f"must be a whole number from {SHORTEST_LIFE_S} to {LONGEST_LIFE_S}"
        raise RefusedRequestError(400, "invalid_expires_after", f"{SECONDS} {message}", SECONDS)
    return float(life_s)


def safe_filename(given: str) -> str:
    """The name without a path and without characters that harm a terminal or a header."""
    name = "".join(
        character
        for character in given.replace("\\", "/").rpartition("/")[2]
        if unicodedata.category(character) not in _UNSAFE_CATEGORIES
        and character not in _UNSAFE_CHARACTERS
    ).strip()
    if name in ("", ".", ".."):
        return _UNNAMED
    suffix = PurePosixPath(name).suffix[:MAX_FILENAME]
    return name if len(name) <= MAX_FILENAME else name[: MAX_FILENAME - len(suffix)] + suffix


def _least_bytes(request: Request) -> int:
    """So many bytes the file has at least, by the length of the form; 0 or less if unknown."""
    return announced_bytes(request.headers) - MAX_OVERHEAD_BYTES


@asynccontextmanager
async def _kept_alive(arriving: ArrivingFile) -> AsyncIterator[None]:
    """Beat for a file in the block; give it up if the block fails."""
    beating = asyncio.create_task(_beat(arriving))
    try:
        yield
    except BaseException:
        await run_in_threadpool(arriving.give_up)
        raise
    finally:
        beating.cancel()


async def _beat(arriving: ArrivingFile) -> None:
    while True:
        await asyncio.sleep(BEAT_EVERY_S)
        try:
            await run_in_threadpool(arriving.beat)
        except StoreError:  # the upload itself meets the fault, too
            logger.warning("an upload cannot beat", extra={"action": "upload_beat_failed"})
