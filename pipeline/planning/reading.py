"""One file of a batch while it is read into a submission, and while its rows land."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from nightjar.jobs.batch_records import Batch
from nightjar.jobs.errors import (
    EmptyJobError,
    ModelNameError,
    QuotaError,
    StoreError,
    TooManyRejectedError,
    TooManyRowsError,
    UnknownFileError,
)
from nightjar.jobs.lines.batch_lines import BatchReader
from nightjar.jobs.lines.file_kinds import HEAD_BYTES, other_format
from nightjar.jobs.model_choice import Choices, ConfiguredModels, RowsModel
from nightjar.jobs.records import JobLimits, JsonObject, NewJob, NewRequest, RejectedRow
from nightjar.jobs.store import Store
from nightjar.jobs.store.staged_rows import MOST_TOLD

_NO_JSON = frozenset({"invalid_json", "invalid_encoding", "line_too_long"})


class UnusableFileError(Exception):
    """A file of which no job can be made; `errors` says why, as OpenAI's `errors.data` does."""

    def __init__(self, *errors: JsonObject) -> None:
        super().__init__(str(errors[0]["message"]))
        self.errors = errors


class _DroppedError(Exception):
    """Ends a submission without a landing."""


class Reading:
    """One file while it is read, and then while its rows land in a thread of their own.

    The rows of a part are staged in a thread while the next part is read and checked: staging
    mostly waits for the database.
    """

    def __init__(
        self, store: Store, batch: Batch, limits: JobLimits, models: ConfiguredModels
    ) -> None:
        self.batch = batch
        self.error: BaseException | None = None
        new_job = NewJob(
            model=batch.model or models.default or "",
            names_model=batch.model is not None,
            metadata=batch.metadata,
            completion_window_s=batch.completion_window_s,
            priority=batch.priority,
            limits=JobLimits(limits.rows, 0) if batch.strict else limits,
            tenant=batch.tenant,
            id=batch.job_id,
            created_at=batch.created_at,
            keep_results_s=batch.output_expires_after_s,
        )
        self._model: RowsModel | None = None
        if batch.model is None:
            choices = Choices(store.models.known(), models, may_wait=True)
            self._model = RowsModel(choices, waits=batch.waits_for_model)
        self._reader = BatchReader(only_url=batch.endpoint if batch.strict else None)
        self._parts = store.files.parts(batch.input_file_id)
        self._head = b""
        self._told: list[RejectedRow] = []  # the first lines, as long as none is JSON
        self._has_json = False
        self._landing: threading.Thread | None = None
        self._stager = ThreadPoolExecutor(1, thread_name_prefix="stage a batch")
        self._staging: Future[None] | None = None
        # What a process that died has left of the same job: only one may land it.
        store.uploads.drop(batch.job_id)
        self._submit = store.jobs.submit(
            new_job, lambda connection: store.batch_work.landed(connection, batch.job_id)
        )
        self._submission = self._submit.__enter__()

    @property
    def is_landing(self) -> bool:
        """Whether the file is read to its end, and its rows land."""
        return self._landing is not None

    @property
    def has_landed(self) -> bool:
        """Whether the landing has ended, well or with `error`."""
        return self._landing is not None and not self._landing.is_alive()

    def read_part(self) -> None:
        """Read one part; after the last one, begin to land.

        What is wrong with the rows of a part may be raised when the next one is read.

        Raises:
            UnusableFileError: No job can be made of the file.
            ModelNameError: Its lines name unknown models alone, or none where there are several.
        """
        part = next(self._parts, None)
        if part is not None:
            self._check_format(part)
            self._add(self._reader.rows(part))
            return
        self._add(self._reader.last_rows())
        if self._told and not self._has_json:
            raise UnusableFileError(
                file_error("invalid_file", "has no line of JSON; write one JSON object a line"),
                *map(_row_error, self._told),
            )
        self._finish_staging()
        self._stager.shutdown()
        if self._model is not None and self._model.has_rows:
            chosen = self._model.choice()
            self._submission.use_model(chosen.name, is_named=chosen.is_named)
        self._landing = threading.Thread(target=self._land, name="land a batch", daemon=True)
        self._landing.start()

    def drop(self) -> None:
        """End without a job; rows that land already go on landing."""
        if self._landing is None:
            self._stager.shutdown()
            dropped = _DroppedError()
            with suppress(_DroppedError, StoreError):
                self._submit.__exit__(_DroppedError, dropped, None)

    def _land(self) -> None:
        try:
            self._submit.__exit__(None, None, None)
        except BaseException as error:  # noqa: BLE001 - handled by the pass that reads
            self.error = error

    def _check_format(self, part: bytes) -> None:
        """Refuse a file whose first bytes are those of another format."""
        if self._head:
            return
        self._head = part[:HEAD_BYTES]
        if (fault := other_format(self._head)) is not None:
            raise UnusableFileError(file_error("invalid_file", f"the file {fault}"))

    def _add(self, rows: Sequence[NewRequest | RejectedRow]) -> None:
        for row in rows:
            if self._has_json:
                break
            if isinstance(row, RejectedRow) and row.code in _NO_JSON:
                if len(self._told) < MOST_TOLD:
                    self._told.append(row)
            else:
                self._has_json = True
        if self._model is not None:
            self._model.look(rows)
        self._finish_staging()  # one part at a time: what waits is bounded
        self._staging = self._stager.submit(self._stage, rows)

    def _stage(self, rows: Sequence[NewRequest | RejectedRow]) -> None:
        self._submission.add(rows)

    def _finish_staging(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.result()


def errors_of(error: BaseException, *, strict: bool) -> Sequence[JsonObject] | None:
    """Why a file cannot be used; None for a fault that may pass."""
    if isinstance(error, UnusableFileError):
        return error.errors
    if isinstance(error, TooManyRejectedError):
        rows = [_row_error(row) for row in error.rows]
        return rows if strict else [file_error("too_many_rejected", str(error)), *rows]
    if isinstance(error, TooManyRowsError | QuotaError | ModelNameError):
        code = "too_many_rows" if isinstance(error, TooManyRowsError) else error.code
        return [file_error(code, str(error))]
    if isinstance(error, EmptyJobError):
        return [file_error("empty_file", "the file has no lines; write one JSON object a line")]
    if isinstance(error, UnknownFileError):
        return [file_error("file_not_found", "the input file was deleted or has expired")]
    return None


def file_error(code: str, message: str) -> JsonObject:
    """An error of the whole file, as `errors.data` has it."""
    return {"code": code, "line": None, "message": message, "param": None}


def _row_error(row: RejectedRow) -> JsonObject:
    return {"code": row.code, "line": row.line, "message": row.message, "param": row.param}
