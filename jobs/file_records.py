"""The typed records of files: what is uploaded for a batch, and what a batch gives back."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Literal

FileOutcome = Literal["succeeded", "failed"]
FileOrder = Literal["asc", "desc"]

PART_BYTES = 1 << 20
"""The most bytes of one stored part of a file."""

BEAT_EVERY_S = 5.0
"""So often an upload raises its file's counter."""

ABANDONED_AFTER_S = 60.0
"""An upload whose counter stands still for so long has lost its process."""


class FilePurpose(StrEnum):
    """What a file is for."""

    BATCH = "batch"  # the lines of a batch, uploaded
    BATCH_OUTPUT = "batch_output"  # the results of a batch


class FileState(StrEnum):
    """Where a file stands. Only a processed file is visible."""

    UPLOADING = "uploading"
    PROCESSED = "processed"
    DELETING = "deleting"  # its parts are being deleted
    DELETED = "deleted"  # its row stays for a while: a listing may go on behind it


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file whose upload begins; filled by whoever receives it."""

    tenant: str
    filename: str
    purpose: FilePurpose = FilePurpose.BATCH


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file; filled by the store."""

    id: str
    tenant: str
    purpose: FilePurpose
    filename: str
    bytes: int
    sha256: str | None  # hexadecimal; None for a result file
    state: FileState
    created_at: datetime
    expires_at: datetime | None
    job_id: str | None  # of a result file: the job whose results are its content
    outcome: FileOutcome | None  # of a result file: which of the results
