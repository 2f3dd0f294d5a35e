"""The two steps of a run of a task: its rows become a job, and the job's answers a table.

Each step may be done again from its beginning. Rows land in one transaction with the note that the
run has them, so they land once. A sink takes the same answers any number of times.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from sqlalchemy.engine import Connection

from nightjar.checkpoints import CheckpointError, ModelDirectory
from nightjar.jobs.errors import (
    EmptyJobError,
    PurgedJobError,
    TooManyRejectedError,
    TooManyRowsError,
    UnknownJobError,
)
from nightjar.jobs.records import Job, JobLimits, NewJob, NewRequest, RejectedRow
from nightjar.jobs.schedule_records import ClaimedRun, RunEnd, RunState
from nightjar.jobs.schedules.fields import check_task_name
from nightjar.jobs.states import JobState
from nightjar.jobs.store import Store
from nightjar.jobs.store.schedule_work import end_of_job
from nightjar.pipeline.files.formats import UnusableInputError, stop_at_bad_rows
from nightjar.pipeline.files.vectors import VectorsError, register_vectors
from nightjar.pipeline.settings import Settings
from nightjar.pipeline.tables.keys import Keys
from nightjar.pipeline.tables.sinks.making import make_sink
from nightjar.pipeline.tables.sinks.sink import Sink, SinkRefusedError
from nightjar.pipeline.tables.sources.piece import SourceError, SourceLostError
from nightjar.pipeline.tasks.errors import TaskError
from nightjar.pipeline.tasks.fitting import ContextFitter
from nightjar.pipeline.tasks.opening import open_source
from nightjar.pipeline.tasks.rendering import Renderer
from nightjar.pipeline.tasks.sinks import answers_of, check_apart, local_outs, placed_sink
from nightjar.pipeline.tasks.task_file import TaskFile, check_task, read_task

Item = TypeVar("Item")

UNUSABLE = (
    *(TaskError, SinkRefusedError, UnusableInputError, VectorsError, CheckpointError),
    *(EmptyJobError, TooManyRowsError, TooManyRejectedError, PurgedJobError, UnknownJobError),
)
"""Errors that another attempt would meet again."""

_FILE = "the task file"  # who has changed a task, for the record of changes


class UnusableRunError(Exception):
    """A run cannot be done; another attempt would not help."""


class StoppedError(Exception):
    """This process is ending: the step is given back."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A task as it was when its rows were read, so that a later change of the file does no harm.

    keys: The types of its key columns.
    """

    file: TaskFile
    keys: pa.Schema

    def to_json(self) -> str:
        """The text that is stored with the run; URLs in it hold no password."""
        keys = base64.b64encode(self.keys.serialize().to_pybytes()).decode()
        task = self.file.task.model_dump(mode="json", exclude_unset=True)
        return json.dumps({"path": str(self.file.path), "task": task, "keys": keys})

    @staticmethod
    def from_json(text: str) -> "Kept":
        """The same of that text."""
        values = json.loads(text)
        path = Path(values["path"])
        keys = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(values["keys"])))
        return Kept(TaskFile(path, check_task(values["task"], str(path))), keys)


class TaskSteps:
    """Does steps of runs; used by several threads, each with a run of its own.

    Args:
        store: Where runs and jobs are.
        settings: The models, the task folder and the limits.
        environment: Where databases' URLs are looked up.
        clock: Gives the moments that are recorded.
        is_stopping: Whether this process is told to end.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        environment: Mapping[str, str],
        clock: Callable[[], datetime],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._store = store
        self._settings = settings
        self._environment = environment
        self._clock = clock
        self._is_stopping = is_stopping

    def do(self, claimed: ClaimedRun) -> None:
        """Do the step that was claimed.

        Raises:
            UnusableRunError: The run cannot be done.
            StoppedError: This process is ending.
        """
        try:
            if claimed.run.state is RunState.READING:
                self._read(claimed)
            else:
                self._write(claimed)
        except SourceLostError:
            raise
        except (*UNUSABLE, SourceError) as error:
            raise UnusableRunError(str(error)) from error

    def _read(self, claimed: ClaimedRun) -> None:
        file = self._task_file(claimed)
        dumped = json.dumps(file.task.model_dump(mode="json", exclude_unset=True), sort_keys=True)
        digest = hashlib.sha256(dumped.encode()).hexdigest()
        self._store.schedule_work.note_task(claimed, digest, _FILE, self._clock())
        name, model = self._model(file)
        self._register_vectors(file, model)
        source = open_source(file, self._environment)
        renderer = Renderer(file.task, source.schema, ContextFitter(file.task, model))
        kept = Kept(file, renderer.keys.schema)
        self._check_sink(kept)
        new_job = NewJob(
            name,
            metadata={"schedule": claimed.schedule_name, "run": claimed.run.id},
            priority=claimed.definition.priority,
            limits=JobLimits(self._settings.max_job_rows),
            tenant=claimed.run.tenant,
            names_model=True,
            keep_results_s=claimed.definition.keep_results_s,
        )

        def landed(connection: Connection) -> None:
            work = self._store.schedule_work
            work.landed(connection, claimed, submission.job_id, kept.to_json())

        with self._store.jobs.submit(new_job, landed) as submission:
            rows: Iterable[NewRequest | RejectedRow] = stop_at_bad_rows(
                renderer.rows(source),
                self._settings.bad_lines_in_a_row,
                "rows",
                "the task or its source",
            )
            submission.add(self._watched(rows))

    def _write(self, claimed: ClaimedRun) -> None:
        job = self._store.jobs.get(claimed.run.job_id or "")
        end = end_of_job(job.state, job.total, job.completed, job.failed)
        if end.state is RunState.FAILED:
            end = self._with_reason(job, end)
        elif end.state is RunState.SUCCEEDED and claimed.task is not None:
            sink = self._sink(Kept.from_json(claimed.task), _results_of(job))
            if sink is not None:
                sink.write(self._watched(self._store.results.iterate(job.id)))
        self._store.schedule_work.finish(claimed, end, self._clock())

    def _with_reason(self, job: Job, end: RunEnd) -> RunEnd:
        """Add the first failure, and that the sink is as it was."""
        told = f"{end.reason}; the sink is as it was, and job {job.id} has the errors"
        if job.state is not JobState.EXPIRED:
            first = next(self._store.results.iterate(job.id, outcome="failed", page_size=1), None)
            if first is not None and first.error is not None:
                told += f"; the first: {first.error.code}: {first.error.message[:300]}"
        return RunEnd(end.state, told, end.total, end.completed, end.failed)

    def _task_file(self, claimed: ClaimedRun) -> TaskFile:
        definition = claimed.definition
        if definition.task_path is not None:
            return read_task(Path(definition.task_path))
        folder, name = self._settings.task_folder, definition.task_name or ""
        if folder is None:
            raise UnusableRunError(
                f"the task {name!r} is looked up in NIGHTJAR_TASK_FOLDER, which is not set where "
                "`nightjar worker tasks` runs"
            )
        try:
            check_task_name(name)
        except ValueError as error:
            raise UnusableRunError(str(error)) from error
        own = (folder / claimed.run.tenant).resolve()
        if not (own / name).resolve().is_relative_to(own):
            raise UnusableRunError(f"the task {name!r} leads out of the task folder")
        return read_task(own / name)

    def _model(self, file: TaskFile) -> tuple[str, ModelDirectory]:
        """The name and directory of the served model that the task names, or of the only one."""
        served, asked = self._settings.model_paths, file.task.model
        if asked is None and len(served) == 1:
            ((name, path),) = served.items()
            return name, ModelDirectory.open(path)
        if asked in served:
            return asked, ModelDirectory.open(served[asked])
        if asked is not None:
            wanted = (file.folder / asked).resolve()
            for name, path in served.items():
                if path.resolve() == wanted:
                    return name, ModelDirectory.open(path)
        told = "names no model" if asked is None else f"names the model {asked!r}"
        raise UnusableRunError(
            f"{file.path} {told}; this deployment serves {', '.join(served)}: name one of them, or "
            "its directory"
        )

    def _register_vectors(self, file: TaskFile, model: ModelDirectory) -> None:
        for name, path in sorted(file.task.prompt_vectors.items()):
            register_vectors(self._store.vectors, name, file.folder / path, model)

    def _check_sink(self, kept: Kept) -> None:
        """Find what would make the write fail, before anything is computed."""
        task, folder = kept.file.task, kept.file.folder
        if task.sink is None:
            return
        placed = placed_sink(task.sink, folder, self._environment)
        check_apart(task, folder, local_outs(placed.config))
        sink = self._sink(kept, "")
        if sink is not None:
            sink.check()

    def _sink(self, kept: Kept, run: str) -> Sink | None:
        task = kept.file.task
        if task.sink is None:
            return None
        placed = placed_sink(task.sink, kept.file.folder, self._environment)
        return make_sink(
            placed.config,
            answers_of(task),
            Keys(kept.keys),
            run=run,
            environment=placed.environment,
        )

    def _watched(self, items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            if self._is_stopping():
                raise StoppedError
            yield item


def _results_of(job: Job) -> str:
    """Name the results of a job; a retry gives others."""
    return f"{job.id} {job.finished_at.isoformat() if job.finished_at else ''}"
