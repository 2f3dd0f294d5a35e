"""The exceptions of this room, all below `JobError`."""

from collections.abc import Sequence
from datetime import datetime

from nightjar.jobs.records import RejectedRow


class JobError(Exception):
    """A job could not be stored, found or changed."""


class EmptyJobError(JobError):
    """The job has no rows: send at least one batch line."""


class TooManyRowsError(JobError):
    """A job has more rows than it may have."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"a job has at most {limit} rows; split it into several, or raise "
            "NIGHTJAR_MAX_JOB_ROWS where the API runs"
        )


class TooManyRejectedError(JobError):
    """So many rows were rejected that the upload is hardly what was meant.

    Attributes:
        rows: The first of them.
    """

    def __init__(self, limit: int, rows: Sequence[RejectedRow]) -> None:
        super().__init__(
            f"more than {limit} lines were rejected, and nothing was stored; the first: "
            f"{rows[0].message}"
        )
        self.rows = rows


class ReusedKeyError(JobError):
    """An idempotency key came again, with other rows or parameters.

    `made` is the id of the job or batch that the key made.
    """

    def __init__(self, made: str, what: str = "job") -> None:
        super().__init__(
            f"this Idempotency-Key made {what} {made!r} of other rows or parameters; give each "
            f"{what} a key of its own"
        )
        self.made = made


class AppendPlaceError(JobError):
    """Rows were appended at another place than the job's end; `total` is its number of rows."""

    def __init__(self, job_id: str, first: int, total: int) -> None:
        super().__init__(
            f"job {job_id!r} has {total} rows, not {first}: another producer appends to it, or a "
            "part is missing; go on behind its last row, or open a job of your own"
        )
        self.total = total


class ModelNameError(JobError):
    """A model was named that is unknown (`model_not_found`), or none was (`missing_model`)."""

    def __init__(self, code: str, message: str, param: str) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class UnknownBatchError(JobError):
    """The tenant has no batch with this id."""

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"there is no batch {batch_id!r}")
        self.batch_id = batch_id


class UnknownJobError(JobError):
    """There is no job with this id."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"there is no job {job_id!r}")
        self.job_id = job_id


class PurgedJobError(JobError):
    """The requests and results of a job were deleted when their time was over."""

    def __init__(self, job_id: str, purged_at: datetime) -> None:
        super().__init__(
            f"the requests and results of job {job_id!r} were purged at "
            f"{purged_at.isoformat(timespec='seconds')}; its counts and usage are still shown"
        )
        self.job_id = job_id
        self.purged_at = purged_at


class UnknownFileError(JobError):
    """The tenant has no file with this id."""

    def __init__(self, file_id: str) -> None:
        super().__init__(f"there is no file {file_id!r}")
        self.file_id = file_id


class FileInUseError(JobError):
    """A file cannot be deleted now."""

    def __init__(self, file_id: str) -> None:
        super().__init__(
            f"the file {file_id!r} is being read by a batch that is being validated; delete it "
            "when the batch is in progress, or cancel the batch"
        )
        self.file_id = file_id


class LostUploadError(JobError):
    """An upload went on after it was taken for abandoned."""

    def __init__(self) -> None:
        super().__init__("the upload gave no sign of life and was taken back; send it again")


class AccountError(JobError):
    """A tenant or a key cannot be made, found or changed."""


class QuotaError(JobError):
    """A tenant has used up what it may use; `retry_after_s` is None where waiting does not help."""

    def __init__(self, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class UnknownWebhookError(JobError):
    """There is no webhook with this id."""

    def __init__(self, webhook_id: str) -> None:
        super().__init__(f"there is no webhook {webhook_id!r}")


class UnknownDeliveryError(JobError):
    """There is no delivery with this id."""

    def __init__(self, delivery_id: str) -> None:
        super().__init__(f"there is no delivery {delivery_id!r}")


class TooManyWebhooksError(JobError):
    """A tenant has as many webhooks as it may have."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"a tenant has at most {limit} webhooks; delete one first")


class UnknownVectorError(JobError):
    """There is no prompt vector of this name and version."""

    def __init__(self, name: str, version: int) -> None:
        wanted = f"version {version}" if version else "version before the latest"
        super().__init__(
            f"the prompt vector {name[:80]!r} has no {wanted}; nightjar vectors list NAME shows "
            "those that there are"
        )


class VectorKindError(JobError):
    """A name is that of prompt vectors, and an adapter was to be registered, or the reverse."""

    def __init__(self, name: str, kind: str) -> None:
        found = "a LoRA adapter" if kind == "lora" else "prompt vectors"
        super().__init__(f"{name[:80]!r} is the name of {found}; take another name")


class VectorAliasError(JobError):
    """This cannot be the alias of a prompt vector's version."""

    def __init__(self, alias: str) -> None:
        super().__init__(
            f"the alias {alias[:80]!r} cannot be used: write a letter, then letters, digits, '.', "
            "'_' or '-', 64 characters at most; `latest` moves by itself or by a rollback"
        )


class UnknownScheduleError(JobError):
    """There is no schedule with this id or name."""

    def __init__(self, schedule: str) -> None:
        super().__init__(f"there is no schedule {schedule!r}")


class DuplicateScheduleError(JobError):
    """A tenant has a schedule of this name already."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is a schedule {name!r} already; change it, or take another name")


class TooManySchedulesError(JobError):
    """A tenant has as many schedules as it may have."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"a tenant has at most {limit} schedules; delete one first")


class UnusableDatabaseError(JobError):
    """The database URL cannot be used, or the database lacks Nightjar's tables."""


class StoreError(JobError):
    """The database refused a statement, or a caller broke the store's rules."""


class StoreUnavailableError(StoreError):
    """The database cannot be reached, is locked or full: try again later."""


class NoSessionError(StoreError):
    """A pooler answers for the database, and `what` needs a session of its own."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs a session of PostgreSQL, and a pooler answers at NIGHTJAR_DATABASE_URL: "
            "name the server itself in NIGHTJAR_DATABASE_DIRECT_URL"
        )


class LifecycleError(JobError):
    """A state may not follow another one: jobs/lifecycle.py has the table."""


POSTGRES_DRIVER = "psycopg"
NO_POSTGRES_DRIVER = (
    f"PostgreSQL needs the driver {POSTGRES_DRIVER}: pip install 'nightjar-batch[postgres]' (in a "
    "checkout after `make demo`: .venv/bin/pip install -c constraints.txt -e '.[postgres]')"
)
"""Said where the driver, an extra of the package, is not installed."""
