"""What an export writes: parts of neighbouring rows, each a file, and a manifest at the end."""

import hashlib
from dataclasses import dataclass
from typing import Literal

import msgspec

from nightjar.jobs.records import Job

Format = Literal["jsonl", "parquet"]
MANIFEST = "_manifest.json"
NOTES = "_parts"
"""The folder of notes, one of each part that is whole."""


class Part(msgspec.Struct, frozen=True):
    """Rows of a job in one file: those behind `after`, up to `last`."""

    number: int
    after: int
    last: int
    name: str

    @property
    def note(self) -> str:
        """The name of the part's note, which says that its file is whole."""
        return f"{NOTES}/{self.name}.json"


class Written(msgspec.Struct, frozen=True):
    """A file of an export: its name, rows and bytes, and the SHA-256 of its bytes."""

    name: str
    rows: int
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """Lists the files of an export. Where it is, the export is whole."""

    job: str
    export: str
    format: Format
    rows: int
    finished_at: str
    files: list[Written]


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of an export.

    export: Tells exports with other results, formats or parts of the job apart; in every name.
    """

    job: Job
    format: Format
    export: str
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, job: Job, format_: Format, rows_per_file: int) -> "Plan":
        """The export of a job that is over, as it is now."""
        told = (job.id, job.finished_at, job.completed, job.failed, job.cancelled)
        key = repr((*told, job.total, format_, rows_per_file))
        export = hashlib.sha256(key.encode()).hexdigest()[:12]
        starts = range(0, job.total, rows_per_file)
        return cls(
            job,
            format_,
            export,
            tuple(
                Part(
                    number,
                    start - 1,
                    min(start + rows_per_file, job.total) - 1,
                    f"part-{number:05d}-{export}.{format_}",
                )
                for number, start in enumerate(starts)
            ),
        )

    def manifest(self, files: list[Written]) -> Manifest:
        """What lists these files, in the order of the parts."""
        ended = self.job.finished_at
        return Manifest(
            self.job.id,
            self.export,
            self.format,
            sum(one.rows for one in files),
            "" if ended is None else ended.isoformat(),
            files,
        )
