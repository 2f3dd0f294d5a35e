"""`nightjar run`: the whole journey of one file on this machine, resumed when run again."""

import hashlib
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from nightjar.checkpoints import CheckpointError, ModelDirectory, ShardError, check_shards
from nightjar.jobs.errors import EmptyJobError, JobError, StoreError
from nightjar.jobs.records import Job, NewJob
from nightjar.jobs.store import Store
from nightjar.jobs.store.paging import Outcome
from nightjar.pipeline.embedded.processes import ServiceError
from nightjar.pipeline.embedded.system import DRAIN_S, EmbeddedSystem
from nightjar.pipeline.embedded.workdir import (
    UsageError,
    check_paths,
    default_workdir,
    file_digest,
    locked_workdir,
    note_written,
    output_paths,
    sqlite_url,
    was_written,
)
from nightjar.pipeline.formats import read_batch_lines, write_results
from nightjar.pipeline.settings import Settings, SettingsError
from nightjar.pipeline.vectors import VectorsError, register_vectors

_POLL_S = 0.2
_FREE_BYTES = 32 << 20


class RunError(Exception):
    """The run cannot go on now; what has landed is kept, and running it again goes on."""


@dataclass(frozen=True, slots=True)
class RunArguments:
    """What `nightjar run` was asked for."""

    source: Path
    model: Path
    out: Path
    dtype: str = "auto"
    workdir: Path | None = None
    prompt_vectors: Mapping[str, Path] = field(default_factory=dict)
    retry: bool = False  # rows that an earlier run failed through no fault of theirs
    reuse_results: Path | None = None  # a file of answers that runs share
    shards: int | None = None  # here and in `devices`: as the environment says
    devices: str | None = None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended."""

    job: Job
    out: Path
    errors: Path
    was_finished: bool  # an earlier run had done it all
    resumed: int  # requests that had their outcome before this run
    seconds: float
    engine_s: float  # of `seconds`: in steps of the engine
    load_s: float  # of `seconds`: in loading the model


class Listener:
    """Hears how the run goes; the command line shows it."""

    def submitted(self, job: Job, *, resumed: bool) -> None:
        """The job is in the store."""

    def progressed(self, job: Job) -> None:
        """Called a few times a second."""

    def noticed(self, line: str) -> None:
        """Something that a person should know, such as a restarted process."""


def run(arguments: RunArguments, listener: Listener) -> RunSummary:
    """Compute every request of the file and write the results.

    Raises:
        UsageError: The arguments cannot be used; nothing was done.
        RunError: The run cannot go on; running it again resumes.
    """
    workdir = arguments.workdir or default_workdir(arguments.out)
    try:
        check_paths(arguments.source, arguments.out, workdir)
        model = ModelDirectory.open(arguments.model)
    except CheckpointError as error:
        raise UsageError(f"--model {arguments.model}: {error}") from error
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    started = time.monotonic()
    with locked_workdir(workdir):
        try:
            return _Run(arguments, model, workdir, listener).execute(started)
        except (SettingsError, ShardError) as error:
            raise UsageError(str(error)) from error
        except EmptyJobError as error:
            raise UsageError(f"the input {arguments.source} has no lines") from error
        except (ServiceError, JobError) as error:
            raise RunError(f"{error}; the work directory is {workdir}") from error
        except OSError as error:
            raise RunError(f"{error.filename or workdir}: {error.strerror}") from error


class _Run:
    """One run, its arguments checked and its work directory held."""

    def __init__(
        self,
        arguments: RunArguments,
        model: ModelDirectory,
        workdir: Path,
        listener: Listener,
    ) -> None:
        self._arguments = arguments
        self._model = model
        self._workdir = workdir
        self._listener = listener
        placed = {"shards": arguments.shards, "devices": arguments.devices}
        self._settings = Settings.read(
            database_url=SecretStr(sqlite_url(workdir.resolve() / "nightjar.db")),
            model=model.path.resolve(),
            model_name=model.name,
            dtype=arguments.dtype,
            accept_any_model=True,
            drain_s=DRAIN_S,
            **_cache_settings(arguments.reuse_results),
            **{name: value for name, value in placed.items() if value is not None},
        )
        check_shards(model.config, self._settings.shard_count)
        self._store = Store(self._settings.database_url.get_secret_value())

    def execute(self, started: float) -> RunSummary:
        try:
            self._store.migrate()
            self._prepare_cache()
            job, resumed = self._submit_or_resume()
            if self._arguments.retry and self._store.retry(job.id):
                job = self._store.job(job.id)
            before = job.ended
            was_finished = job.is_over and was_written(self._workdir, self._arguments.out)
            self._listener.submitted(job, resumed=resumed)
            earlier = self._store.compute_seconds()  # of runs that this one goes on from
            if not job.is_over:
                job = self._compute(job)
            spent = self._store.compute_seconds() - earlier
            if not was_finished:
                self._write(job)
        finally:
            self._store.close()
        out, errors = output_paths(self._arguments.out)
        return RunSummary(
            job=job,
            out=out,
            errors=errors,
            was_finished=was_finished,
            resumed=before if resumed else 0,
            seconds=time.monotonic() - started,
            engine_s=spent.engine_s,
            load_s=spent.load_s,
        )

    def _prepare_cache(self) -> None:
        path, url = self._arguments.reuse_results, self._settings.result_cache_url
        if path is None or url is None:
            return
        answers = Store(url.get_secret_value())
        try:
            answers.migrate()
        except StoreError as error:
            raise UsageError(f"--reuse-results {path}: {error}") from error
        finally:
            answers.close()

    def _submit_or_resume(self) -> tuple[Job, bool]:
        """The job of these arguments, and whether an earlier run had submitted it."""
        vectors = self._register_vectors()
        parts = [file_digest(self._arguments.source), self._model.fingerprint]
        parts += [self._arguments.dtype, *vectors]
        key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        earlier = self._store.jobs(limit=1, after=None)
        with self._store.submission(NewJob(self._model.name, idempotency_key=key)) as submission:
            if not submission.existing:
                if earlier:
                    raise UsageError(
                        f"{self._workdir} belongs to another run: the input, the model, --dtype or "
                        "the prompt vectors have changed since; give --workdir or --out anew, or "
                        "remove that directory"
                    )
                with self._arguments.source.open("rb") as stream:
                    submission.add(read_batch_lines(stream))
        return self._store.job(submission.job_id), submission.existing

    def _register_vectors(self) -> list[str]:
        registered = []
        for name, path in sorted(self._arguments.prompt_vectors.items()):
            try:
                vectors = register_vectors(self._store, name, path, self._model.config.hidden_size)
            except VectorsError as error:
                raise UsageError(f"--prompt-vector {name}: {error}") from error
            registered.append(f"{name} {vectors.sha256}")
        return registered

    def _compute(self, job: Job) -> Job:
        """Run the services until the job is over; when this returns, they have ended."""
        logs = self._workdir / "logs"
        with EmbeddedSystem(self._store, self._settings, logs, self._listener.noticed) as system:
            while not job.is_over:
                time.sleep(_POLL_S)
                system.watch()
                self._check_disk()
                ended, job = job.ended, self._store.job(job.id)
                if job.ended > ended:
                    system.progressed()
                self._listener.progressed(job)
        return job

    def _check_disk(self) -> None:
        free = shutil.disk_usage(self._workdir).free
        if free < _FREE_BYTES:
            raise RunError(
                f"the disk of {self._workdir} is full ({free >> 20} MiB free, {_FREE_BYTES >> 20} "
                "needed); free some and run the same command again to go on"
            )

    def _write(self, job: Job) -> None:
        out, errors = output_paths(self._arguments.out)
        outcomes: list[tuple[Path, Outcome]] = [(out, "succeeded"), (errors, "failed")]
        for path, outcome in outcomes:
            try:
                write_results(path, self._store.iter_results(job.id, outcome=outcome))
            except OSError as error:
                raise RunError(
                    f"{path} cannot be written: {error.strerror}; the results are kept in "
                    f"{self._workdir}: run the same command again to write them"
                ) from error
        note_written(self._workdir, self._arguments.out)


def _cache_settings(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    return {"reuse_results": True, "result_cache_url": SecretStr(sqlite_url(path.resolve()))}
