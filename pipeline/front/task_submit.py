"""A task on a deployment: its rows go to the API as one job, and its answers into its sink."""

import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from nightjar.checkpoints import CheckpointError, ModelDirectory
from nightjar.jobs.lines.batch_lines import LINE_URLS, rejected_line
from nightjar.jobs.records import (
    JsonObject,
    NewRequest,
    RejectedRow,
    RequestError,
    ResultRecord,
)
from nightjar.jobs.store.bodies import dump_body
from nightjar.pipeline.client.blocking import Client, Job
from nightjar.pipeline.client.errors import RefusedError
from nightjar.pipeline.client.options import SubmitOptions
from nightjar.pipeline.client.records import JobStatus, Result
from nightjar.pipeline.embedded.work import RunError
from nightjar.pipeline.embedded.workdir import UsageError, names_changed
from nightjar.pipeline.front.task_work import TaskWork
from nightjar.pipeline.tables.sinks.sink import SinkCounts

_NOTE = "submitted.json"
_SENDING = "sending"
_GONE = ("unknown_job", "results_purged")


@dataclass(frozen=True, slots=True)
class Submitted:
    """What is noted of a job whose answers are not in the sink yet.

    asked: What decides about the answers, by names that the user knows.
    job_id: None until the API has answered.
    """

    asked: dict[str, str]
    key: str
    job_id: str | None = None


class TaskSubmission:
    """Submits one task, and writes its answers; the same again goes on with the same job.

    Args:
        work: The task, with a sink or an output file.
        client: Of the deployment.
        workdir: Where the job is noted.
    """

    def __init__(self, work: TaskWork, client: Client, workdir: Path) -> None:
        self._work = work
        self._client = client
        self._note = workdir / _NOTE

    def submit(self, model: str | None, most_bad_in_a_row: int, options: SubmitOptions) -> Job:
        """Submit the rows, or return the job of an earlier submission that is not written yet.

        Raises:
            UsageError: The task or its source cannot be used, or has changed since that submission.
            RunError: The source cannot be read on now.
            ClientError: The API refuses the job.
            OSError: The rows cannot be kept until they are sent.
        """
        asked = {**self._work.identity(), "the model": model or "", "the API": self._address}
        noted = self._noted()
        if noted is not None:
            self._check_same(noted, asked)
            if noted.job_id is not None:
                job = self._client.job(noted.job_id)
                with self._telling_gone():
                    job.status()
                return job
        key = secrets.token_hex(16) if noted is None else noted.key
        self._write_note(Submitted(asked, key))
        with self._sending() as path:
            if not self._write_rows(path, most_bad_in_a_row):
                self._note.unlink()
                raise UsageError(f"{self._work.name} has no rows")
            options = options.copy()
            options["model"], options["idempotency_key"] = model, key
            job = self._client.submit(path, **options)
        self._write_note(Submitted(asked, key, job.id))
        return job

    @contextmanager
    def _sending(self) -> Iterator[Path]:
        """Give the path of a file for the rows; a killed command has left its own."""
        folder = self._note.with_name(_SENDING)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        try:
            yield folder / "rows.jsonl"
        finally:
            shutil.rmtree(folder)

    def write(self, job: Job, status: JobStatus) -> SinkCounts:
        """Write the answers of a job that is over into the sink, and forget the job.

        Raises:
            RunError: They cannot be written; the same command writes them later.
            ClientError: The API refuses them.
        """
        run = f"{job.id} {status.finished_at}"
        with self._telling_gone():
            counts = self._work.write_results(_records(job.results()), run)
        self._note.unlink(missing_ok=True)
        return counts

    @contextmanager
    def _telling_gone(self) -> Iterator[None]:
        """Raise RunError for a job that was purged, or is of another deployment."""
        try:
            yield
        except RefusedError as error:
            if error.code in _GONE:
                raise RunError(f"{error}; remove {self._note} and submit the task again") from error
            raise

    @property
    def _address(self) -> str:
        return self._client.asking.api_url

    def _check_same(self, noted: Submitted, asked: Mapping[str, str]) -> None:
        changed = [name for name, value in asked.items() if noted.asked.get(name) != value]
        if changed:
            job = noted.job_id or "that is not finished"
            raise UsageError(
                f"the answers of an earlier submission (job {job}) are not written yet, and "
                f"{names_changed(changed)}: change it back and run this with --watch, or remove "
                f"{self._note} to give them up"
            )

    def _write_rows(self, path: Path, most_bad_in_a_row: int) -> int:
        count, is_chat = 0, self._work.is_chat
        with path.open("wb") as stream:
            for row in self._work.rows(most_bad_in_a_row):
                stream.write(batch_line(row, is_chat=is_chat))
                count += 1
        return count

    def _noted(self) -> Submitted | None:
        try:
            return msgspec.json.decode(self._note.read_bytes(), type=Submitted)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise UsageError(f"{self._note} cannot be read; remove it to submit anew") from error

    def _write_note(self, noted: Submitted) -> None:
        building = self._note.with_suffix(".new")
        building.write_bytes(msgspec.json.encode(asdict(noted)))
        building.replace(self._note)


def deployed_model(given: str | None, folder: Path) -> tuple[str | None, ModelDirectory | None]:
    """Return the model's name in a deployment, and its directory if there is one here.

    Args:
        given: `model` of the task: a directory, or a name.
        folder: The folder of the task file.

    Raises:
        UsageError: The directory holds no model.
    """
    if given is None:
        return None, None
    path = folder / Path(given).expanduser()
    if not path.is_dir():
        return given, None
    try:
        found = ModelDirectory.open(path)
    except CheckpointError as error:
        raise UsageError(f"model {given}: {error}") from error
    return found.name, found


def batch_line(row: NewRequest | RejectedRow, *, is_chat: bool) -> bytes:
    """Return the batch line of a row; that of a rejected row says why it is no request."""
    if isinstance(row, RejectedRow):
        return rejected_line(row)
    body: JsonObject = msgspec.json.decode(dump_body(row.body))
    if is_chat and "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    line = {
        "custom_id": row.custom_id,
        "method": "POST",
        "url": LINE_URLS[row.kind, is_chat],
        "body": body,
    }
    return msgspec.json.encode(line) + b"\n"


def _records(results: Iterable[Result]) -> Iterator[ResultRecord]:
    """Yield the results of a job that is over, which come in row order, as records."""
    for index, result in enumerate(results):
        told = result.error
        error = None if told is None else RequestError(told.code, told.message, told.param)
        response = result.raw.get("response") or {}
        yield ResultRecord(
            id=0,
            index=index,
            line=index + 1,
            custom_id=result.custom_id,
            status_code=int(response.get("status_code") or 0),
            body=response.get("body") if error is None else None,
            error=error,
            prompt_tokens=0 if result.usage is None else result.usage.prompt_tokens,
            completion_tokens=0 if result.usage is None else result.usage.completion_tokens,
            requested_tokens=0,
            saved_tokens=0,
            finish_reason=result.finish_reason,
        )
