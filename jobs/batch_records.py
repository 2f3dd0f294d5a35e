"""The typed records of batches: OpenAI's view of a job whose rows come from a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from nightjar.jobs import lifecycle
from nightjar.jobs.records import DEFAULT_TENANT, Job, JsonObject, RequestError
from nightjar.jobs.states import BatchStage, BatchStatus

DAY_S = 86_400.0
_BATCH, _JOB = "batch_", "job_"


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch to be made; filled by the API."""

    endpoint: str
    input_file_id: str
    tenant: str = DEFAULT_TENANT
    completion_window: str = "24h"
    completion_window_s: float = DAY_S
    metadata: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False  # one bad line, or one with another URL, fails the batch
    model: str | None = None  # None: what its lines name, or the only one
    priority: int = 0
    output_expires_after_s: int | None = None  # of the result files, from their creation
    waits_for_model: bool = False  # an unknown model is no error
    idempotency_key: str | None = None
    digest: str | None = None  # with a key: SHA-256 of the other fields, but for the file


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as it stands; filled by the store. Moments that are not reached are None."""

    job_id: str
    tenant: str
    stage: BatchStage
    endpoint: str
    input_file_id: str
    completion_window: str
    completion_window_s: float
    metadata: Mapping[str, str]
    strict: bool
    model: str | None
    priority: int
    output_expires_after_s: int | None
    errors: Sequence[JsonObject]  # why its file cannot be used: code, line, message, param
    created_at: datetime
    in_progress_at: datetime | None  # its rows have landed
    cancelling_at: datetime | None
    ended_at: datetime | None  # the last status
    output_file_id: str | None
    error_file_id: str | None
    waits_for_model: bool
    job: Job | None = None  # once its rows have landed

    @property
    def id(self) -> str:
        """The batch's id; the job has the same one with another prefix."""
        return batch_id_of(self.job_id)

    @property
    def status(self) -> BatchStatus:
        """The status in OpenAI's words."""
        state = None if self.job is None else self.job.state
        return lifecycle.batch_status(self.stage, state, cancelling=self.cancelling_at is not None)


class RawResult(msgspec.Struct, frozen=True):
    """One landed outcome for a file of results: its body is the JSON as stored, not parsed."""

    id: int  # the request's id
    line: int
    custom_id: str | None
    status_code: int
    body: msgspec.Raw | None
    error: RequestError | None


class ResultShape(msgspec.Struct, frozen=True):
    """What is needed to tell the length of a result's line."""

    index: int
    record: RawResult  # a success has an empty body
    body_bytes: int  # of the body as stored
    is_reused: bool  # its body is written otherwise than it is stored


@dataclass(frozen=True, slots=True)
class FileCount:
    """Lines and bytes of a result file."""

    lines: int = 0
    bytes: int = 0

    def with_lines(self, sizes: Sequence[int]) -> "FileCount":
        """The same with more lines of these sizes."""
        return FileCount(self.lines + len(sizes), self.bytes + sum(sizes))

    def with_plain(self, plain: "FileCount", overhead: int) -> "FileCount":
        """The same with these lines, each of which takes `overhead` bytes more."""
        return FileCount(
            self.lines + plain.lines, self.bytes + plain.bytes + overhead * plain.lines
        )


@dataclass(frozen=True, slots=True)
class ResultLengths:
    """What is needed to tell the lengths of the next lines.

    Attributes:
        counted_to: The last of these rows.
        plain: The successes whose lines differ in their ids and bodies alone, and the bytes of
            their custom ids and bodies.
        others: The other rows, in row order.
    """

    counted_to: int
    plain: FileCount
    others: Sequence[ResultShape]


@dataclass(frozen=True, slots=True)
class Finalization:
    """How far the result files of a batch are counted; filled by the planner."""

    job_id: str
    counted_to: int = -1  # the last row that is counted
    output: FileCount = FileCount()
    errors: FileCount = FileCount()

    @classmethod
    def of(cls, job_id: str, counted_to: int, *counts: int) -> "Finalization":
        """What `counts` gives, as a record again."""
        return cls(job_id, counted_to, FileCount(*counts[:2]), FileCount(*counts[2:]))

    def counts(self) -> tuple[int, ...]:
        """The last row that is counted, then lines and bytes of output and errors."""
        output, errors = self.output, self.errors
        return self.counted_to, output.lines, output.bytes, errors.lines, errors.bytes


def batch_id_of(job_id: str) -> str:
    """The id of the batch that a job is."""
    return f"{_BATCH}{job_id.removeprefix(_JOB)}"


def job_id_of(batch_id: str) -> str | None:
    """The id of the job that a batch is; None for what is no batch's id."""
    if not batch_id.startswith(_BATCH):
        return None
    return f"{_JOB}{batch_id.removeprefix(_BATCH)}"
