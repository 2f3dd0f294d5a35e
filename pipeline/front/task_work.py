"""The work of a run that a task file describes: rows of a table in, a table of answers out."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.records import Job, NewRequest, RejectedRow, ResultRecord
from nightjar.jobs.store import Store
from nightjar.pipeline.embedded.line_files import LineOutput
from nightjar.pipeline.embedded.work import RunError, noting_precisions
from nightjar.pipeline.embedded.workdir import (
    UsageError,
    check_overwrites,
    note_delivered,
    were_delivered,
)
from nightjar.pipeline.files.formats import UnusableInputError, stop_at_bad_rows
from nightjar.pipeline.tables.sinks.making import make_sink
from nightjar.pipeline.tables.sinks.sink import Sink, SinkCounts, SinkError, SinkRefusedError
from nightjar.pipeline.tables.sources.piece import Source, SourceError, SourceLostError
from nightjar.pipeline.tasks.errors import TaskError
from nightjar.pipeline.tasks.fitting import ContextFitter
from nightjar.pipeline.tasks.opening import open_source
from nightjar.pipeline.tasks.rendering import Renderer
from nightjar.pipeline.tasks.sinks import (
    answers_of,
    check_apart,
    is_there,
    local_outs,
    placed_sink,
)
from nightjar.pipeline.tasks.task_file import TaskFile


class TaskWork:
    """The work of one task file.

    Args:
        file: The task.
        out: The file of answers of a task without a sink.
        environment: Where databases' URLs are looked up.
    """

    units = "rows"
    starts_anew = True

    def __init__(self, file: TaskFile, out: Path | None, environment: Mapping[str, str]) -> None:
        self._file = file
        self._environment = environment
        self.name = f"the task {file.path}"
        self.workdir = file.path.with_name(f"{file.path.name}.work")
        self._lines = None if out is None else LineOutput(out)
        self._source: Source | None = None
        self._renderer: Renderer | None = None
        self._left_out = 0  # failures that the table has no place for
        self._deleted = 0  # rows of earlier runs that left a mirrored table
        sink = file.task.sink
        self._sink = None if sink is None else placed_sink(sink, file.folder, environment)

    @property
    def results(self) -> str:
        """Where the answers are."""
        if self._lines is not None:
            return self._lines.results
        left = f"; {self._deleted} rows of earlier runs left it" if self._deleted else ""
        return f"{self._open('').target}{left}"

    @property
    def failures(self) -> str:
        """Where the failures are."""
        if self._lines is not None:
            return self._lines.failures
        place = self._open("").target
        if self._sink is not None and not self._sink.config.keeps_errors:
            place = self._sink.config.errors
        if self._left_out:
            return f"{place}, without {self._left_out} rows that have no key of their own"
        return place

    @property
    def is_fixed(self) -> bool:
        """Whether the rows are the same as long as the source says so."""
        return self._opened()[0].is_fixed

    def check(self, workdir: Path, *, overwrite: bool) -> None:
        """Check where the answers go, as far as that is known without the source."""
        if self._sink is not None and self._lines is not None:
            raise UsageError(f"{self.name} has a [sink]; leave --out out, or remove the table")
        self._check_apart()
        if self._sink is not None:
            if overwrite:
                self._sink = self._sink.overwriting()
            return
        if self._lines is None:
            raise UsageError(
                f"{self.name} has no [sink]; add one, or give --out OUT.jsonl for answers as JSON "
                "lines"
            )
        out = self._lines.path
        if out.is_dir() or not out.parent.is_dir():
            raise UsageError(f"--out {out}: name a file in a directory that is there")
        if not overwrite:
            check_overwrites(out, workdir)

    def _check_apart(self) -> None:
        """Refuse answers in the place of the rows."""
        outs = [] if self._sink is None else local_outs(self._sink.config)
        if self._lines is not None:
            outs += [self._lines.results, self._lines.failures]
        try:
            check_apart(self._file.task, self._file.folder, outs)
        except TaskError as error:
            raise UsageError(f"{self.name}: {error}") from error

    @property
    def is_chat(self) -> bool:
        """Whether the requests have messages."""
        return self._file.task.kind == "chat"

    def prepare(self, model: ModelDirectory | None, *, with_sink: bool = True) -> None:
        """Open the source, and check that the task fits its columns and the sink.

        Without a model no column can be cropped to tokens.
        """
        task = self._file.task
        fitter = None if model is None else ContextFitter(task, model)
        try:
            self._source = open_source(self._file, self._environment)
            self._renderer = Renderer(task, self._source.schema, fitter)
            if with_sink and self._sink is not None:
                self._open("").check()
        except (TaskError, SourceError) as error:
            raise UsageError(f"{self._file.path}: {error}") from error
        except SinkRefusedError as error:
            raise UsageError(f"{self._file.path}: [sink] {error}") from error

    def identity(self) -> Mapping[str, str]:
        """Return what the task says, and the digest of its source."""
        return {"the source": self._opened()[0].digest(), **self._file.parts()}

    def rows(self, most_bad_in_a_row: int | None) -> Iterator[NewRequest | RejectedRow]:
        """Yield a request or a rejected row for each row of the source."""
        source, renderer = self._opened()
        try:
            yield from stop_at_bad_rows(
                renderer.rows(source), most_bad_in_a_row, "rows", "the task or its source"
            )
        except SourceLostError as error:
            raise RunError(f"{self.name}: {error}") from error
        except SourceError as error:
            raise UsageError(f"{self._file.path}: {error}") from error
        except UnusableInputError as error:
            raise UsageError(f"{self.name} {error}") from error

    def write(self, store: Store, job: Job, workdir: Path, *, overwrite: bool) -> set[str]:
        """Write the answers into the sink, or as JSON lines."""
        if self._lines is not None:
            precisions = self._lines.write(store, job, workdir, overwrite=overwrite)
        else:
            precisions = set()
            results = noting_precisions(store.results.iterate(job.id), precisions)
            self.write_results(results, _results_of(job), f"in {workdir}")
        note_delivered(workdir, _results_of(job))
        return precisions

    def write_results(
        self, results: Iterable[ResultRecord], run: str, kept: str = "by the deployment"
    ) -> SinkCounts:
        """Write results, which come in row order, into the sink.

        Args:
            results: Of all rows.
            run: The same for the same results.
            kept: Where they are if they cannot be written, for the message.

        Raises:
            RunError: They cannot be written now.
        """
        try:
            counts = self._open(run).write(results)
        except SinkError as error:
            raise RunError(
                f"{error}; the results are kept {kept}: run the same command again to write them"
            ) from error
        self._left_out, self._deleted = counts.left_out, counts.deleted
        return counts

    def was_written(self, workdir: Path, job: Job) -> bool:
        """Whether these results were written, and are still there."""
        if not were_delivered(workdir, _results_of(job)):
            return False
        if self._lines is not None:
            return self._lines.is_as_written(workdir)
        return self._sink is not None and is_there(self._sink.config)

    def _opened(self) -> tuple[Source, Renderer]:
        if self._source is None or self._renderer is None:
            raise RuntimeError("the work is prepared first")
        return self._source, self._renderer

    def _open(self, run: str) -> Sink:
        renderer = self._opened()[1]
        if self._sink is None:
            raise RuntimeError("the task has a sink, or --out")
        return make_sink(
            self._sink.config,
            answers_of(self._file.task),
            renderer.keys,
            run=run,
            environment=self._sink.environment,
        )


def _results_of(job: Job) -> str:
    """Name the results of a job; a retry gives others."""
    return f"{job.id} {job.finished_at.isoformat() if job.finished_at else ''}"
