"""`nightjar run`: computes a file or a task on this machine; the same command resumes it."""

import hashlib
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from nightjar.checkpoints import CheckpointError, ModelDirectory, ShardError, check_shards
from nightjar.checkpoints.adapters import not_served
from nightjar.compute_config import KVCacheDtype
from nightjar.jobs.errors import EmptyJobError, JobError, StoreError
from nightjar.jobs.lines.batch_lines import output_line
from nightjar.jobs.records import Job, NewJob, NewRequest, RejectedRow
from nightjar.jobs.store import Store
from nightjar.pipeline.embedded.patience import Patience
from nightjar.pipeline.embedded.processes import ServiceError
from nightjar.pipeline.embedded.summary import Listener, RunSummary
from nightjar.pipeline.embedded.system import DRAIN_S, EmbeddedSystem
from nightjar.pipeline.embedded.work import RunError, Work
from nightjar.pipeline.embedded.workdir import (
    UsageError,
    database_path,
    forget_state,
    locked_workdir,
    note_asked,
    note_speed,
    noted_asked,
    sqlite_url,
    what_changed,
)
from nightjar.pipeline.files.formats import failure_text
from nightjar.pipeline.files.vectors import VectorsError, register_vectors
from nightjar.pipeline.settings import Settings, SettingsError

_POLL_S = 0.2
_WATCH_ROWS = 1_000
_FREE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class RunArguments:
    """The arguments of `nightjar run`."""

    work: Work
    model: Path
    dtype: str = "auto"
    workdir: Path | None = None
    prompt_vectors: Mapping[str, Path] = field(default_factory=dict)
    retry: bool = False  # compute rows again that failed through no fault of theirs
    reuse_results: Path | None = None  # a file of answers that runs share
    accept_any_model: bool = False  # compute lines that name another model, too
    overwrite: bool = False  # replace output files that no run of this directory has written
    shards: int | None = None  # None, also in `devices`: what the environment says
    devices: str | None = None


def run(arguments: RunArguments, listener: Listener) -> RunSummary:
    """Compute every request of the input and write the results.

    Raises:
        UsageError: The arguments cannot be used; nothing was done.
        RunError: The run cannot continue; the same command resumes it.
    """
    work = arguments.work
    workdir = arguments.workdir or work.workdir
    work.check(workdir, overwrite=arguments.overwrite)
    try:
        model = ModelDirectory.open(arguments.model)
    except CheckpointError as error:
        raise UsageError(f"--model {arguments.model}: {error}") from error
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    work.prepare(model)
    started = time.monotonic()
    with locked_workdir(workdir):
        try:
            return _Run(arguments, model, workdir, listener).execute(started)
        except (SettingsError, ShardError) as error:
            raise UsageError(str(error)) from error
        except EmptyJobError as error:
            raise UsageError(f"{work.name} has no {work.units}") from error
        except (ServiceError, JobError) as error:
            raise RunError(f"{error}; the work directory is {workdir}") from error
        except OSError as error:
            raise RunError(f"{error.filename or workdir}: {error.strerror}") from error


class _Run:
    """One run with checked arguments and a locked work directory."""

    def __init__(
        self,
        arguments: RunArguments,
        model: ModelDirectory,
        workdir: Path,
        listener: Listener,
    ) -> None:
        self._arguments = arguments
        self._work = arguments.work
        self._model = model
        self._workdir = workdir
        self._listener = listener
        placed = {"shards": arguments.shards, "devices": arguments.devices}
        placed["accept_any_model"] = arguments.accept_any_model or None
        self._settings = Settings.read(
            database_url=SecretStr(sqlite_url(database_path(workdir))),
            model=model.path.resolve(),
            model_name=model.name,
            models="",  # a run has one model, whatever a deployment has
            dtype=arguments.dtype,
            drain_s=DRAIN_S,
            **_cache_settings(arguments.reuse_results),
            **{name: value for name, value in placed.items() if value is not None},
        )
        check_shards(model.config, self._settings.shard_count)
        self._store = Store(self._settings.database_url.get_secret_value())
        self._system: EmbeddedSystem | None = None

    def execute(self, started: float) -> RunSummary:
        try:
            self._store.migrate()
            self._prepare_cache()
            if self._is_followed():
                self._forget_finished()
            earlier = self._store.heartbeats.compute_seconds()  # of the runs that this one resumes
            with ExitStack() as services:
                job, resumed = self._submit_or_resume(services)
                if self._arguments.retry and self._store.retries.retry(job.id):
                    job = self._store.jobs.get(job.id)
                before = job.ended
                was_finished = job.is_over and self._work.was_written(self._workdir, job)
                self._listener.submitted(job, resumed=resumed)
                if not job.is_over:
                    job = self._compute(job, self._started(services))
                if self._system is not None:  # the services end while the results are written
                    self._system.terminate()
                precisions: set[str] = set()
                if not was_finished:
                    overwrite = self._arguments.overwrite
                    precisions = self._work.write(
                        self._store, job, self._workdir, overwrite=overwrite
                    )
            spent = self._store.heartbeats.compute_seconds() - earlier
            failed = next(self._store.results.iterate(job.id, outcome="failed"), None)
        finally:
            self._store.close()
        seconds = time.monotonic() - started
        if job.ended > before:
            note_speed(self._workdir, job, job.ended - before, seconds - spent.load_s)
        return RunSummary(
            job=job,
            out=self._work.results,
            errors=self._work.failures,
            was_finished=was_finished,
            resumed=before if resumed else 0,
            seconds=seconds,
            engine_s=spent.engine_s,
            load_s=spent.load_s,
            first_failure=None if failed is None else failure_text(output_line(failed)),
            precisions=sorted(precisions),
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

    def _submit_or_resume(self, services: ExitStack) -> tuple[Job, bool]:
        """Return the job of these arguments, and whether an earlier run had submitted it.

        The services of a new job start before its rows are read, and load the model meanwhile.
        """
        asked = self._asked()
        # Empty values are left out, so that an older version without them has the same key.
        parts = [value for value in asked.values() if value]
        key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        newest = next(iter(self._store.jobs.newest(limit=1, after=None)), None)
        # A job without a success is replaced: its input may be corrected now, and nothing is lost.
        is_spent = newest is not None and newest.is_over and not newest.completed
        with self._store.jobs.submit(NewJob(self._model.name, idempotency_key=key)) as submission:
            known = submission.existing
            if newest and (submission.job_id != newest.id if known else not is_spent):
                raise UsageError(
                    f"{self._workdir} belongs to another run: "
                    f"{what_changed(self._workdir, asked)}; give another --workdir or --out, or "
                    "remove that directory"
                )
            if not known:
                note_asked(self._workdir, asked)
                rows = self._work.rows(self._settings.bad_lines_in_a_row)
                submission.add(_watched(rows, self._started(services)))
        return self._store.jobs.get(submission.job_id), submission.existing

    def _asked(self) -> dict[str, str]:
        """Return what decides about the answers, by names that the user knows."""
        return {
            **self._work.identity(),
            "the model": self._model.fingerprint,
            "--dtype": self._arguments.dtype,
            **_cache_dtype(self._settings.kv_cache_dtype),
            "the prompt vectors": "\n".join(self._register_vectors()),
            "--accept-any-model": "yes" if self._settings.accept_any_model else "",
        }

    def _is_followed(self) -> bool:
        """Whether the earlier run of this directory is over, and this one computes anew."""
        if not self._work.starts_anew or self._arguments.retry:
            return False
        newest = next(iter(self._store.jobs.newest(limit=1, after=None)), None)
        if newest is None or not newest.is_over:
            return False
        if not self._work.was_written(self._workdir, newest):
            return False
        return not self._work.is_fixed or noted_asked(self._workdir) != self._asked()

    def _forget_finished(self) -> None:
        """Begin with an empty store: the answers of the earlier run are where they belong."""
        self._store.close()
        forget_state(self._workdir)
        self._store = Store(self._settings.database_url.get_secret_value())
        self._store.migrate()

    def _register_vectors(self) -> list[str]:
        registered = []
        given = self._arguments.prompt_vectors
        ranks = self._settings.shard_count
        no_adapters = not_served(self._model, self._arguments.dtype, ranks)
        for name, path in sorted(given.items()):
            try:
                store = self._store.vectors
                vectors = register_vectors(store, name, path, self._model, no_adapters)
            except VectorsError as error:
                raise UsageError(f"--prompt-vector or --adapter {name}: {error}") from error
            registered.append(f"{name} {vectors.sha256}")
        return registered

    def _started(self, services: ExitStack) -> EmbeddedSystem:
        """Start the services, unless they are; they end with the block of `services`."""
        if self._system is None:
            logs = self._workdir / "logs"
            system = EmbeddedSystem(self._store, self._settings, logs, self._listener.noticed)
            self._system = services.enter_context(system)
        return self._system

    def _compute(self, job: Job, system: EmbeddedSystem) -> Job:
        """Keep the services running until the job is over."""
        watch = Patience(self._store.jobs, self._listener.noticed)
        while not job.is_over:
            time.sleep(_POLL_S)
            system.watch()
            self._check_disk()
            ended, job = job.ended, self._store.jobs.get(job.id)
            if job.ended > ended:
                system.progressed()
            watch.check(job)
            self._listener.progressed(job)
        return job

    def _check_disk(self) -> None:
        free = shutil.disk_usage(self._workdir).free
        if free < _FREE_BYTES:
            raise RunError(
                f"the disk of {self._workdir} is full ({free >> 20} MiB free, {_FREE_BYTES >> 20} "
                "needed); free some, then run the same command again to continue"
            )


def _watched(
    rows: Iterable[NewRequest | RejectedRow], system: EmbeddedSystem
) -> Iterator[NewRequest | RejectedRow]:
    """Yield the rows; a model that cannot be loaded ends a run before all are read."""
    for number, row in enumerate(rows):
        if number % _WATCH_ROWS == 0:
            system.watch()
        yield row


def _cache_dtype(dtype: KVCacheDtype) -> dict[str, str]:
    """Return the dtype of keys and values where it is given: an older version noted none."""
    return {} if dtype == "auto" else {"NIGHTJAR_KV_CACHE_DTYPE": dtype}


def _cache_settings(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    return {"reuse_results": True, "result_cache_url": SecretStr(sqlite_url(path.resolve()))}
