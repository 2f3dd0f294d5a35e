"""The work of a run that reads a file of OpenAI batch lines, and writes such files."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.records import Job, NewRequest, RejectedRow
from nightjar.jobs.store import Store
from nightjar.jobs.store.result_rows import Outcome
from nightjar.pipeline.embedded.work import RunError, noting_precisions
from nightjar.pipeline.embedded.workdir import (
    UsageError,
    check_overwrites,
    check_paths,
    default_workdir,
    file_digest,
    note_writing,
    note_written,
    output_paths,
    was_written,
)
from nightjar.pipeline.files.formats import (
    UnusableInputError,
    check_format,
    read_batch_lines,
    write_results,
)


class LineOutput:
    """A file of answers, and one of failures beside it.

    results, failures: Their paths.
    """

    def __init__(self, out: Path) -> None:
        self.path = out
        self.results, self.failures = map(str, output_paths(out))

    def write(self, store: Store, job: Job, workdir: Path, *, overwrite: bool) -> set[str]:
        """Write successes and failures; return the precisions of the answers.

        Raises:
            RunError: A file cannot be written, or would replace a file that no run has written.
        """
        paths = output_paths(self.path)
        outcomes: list[tuple[Path, Outcome]] = [(paths[0], "succeeded"), (paths[1], "failed")]
        if not overwrite:
            try:  # again: a file may have been put there while the run computed
                check_overwrites(self.path, workdir)
            except UsageError as error:
                raise RunError(f"{error}; the results are kept in {workdir}") from error
        note_writing(workdir, self.path)
        precisions: set[str] = set()
        for path, outcome in outcomes:
            try:
                results = store.results.iterate(job.id, outcome=outcome)
                write_results(path, noting_precisions(results, precisions))
            except OSError as error:
                raise RunError(
                    f"{path} cannot be written: {error.strerror}; the results are kept in "
                    f"{workdir}: run the same command again to write them"
                ) from error
        note_written(workdir, self.path)
        return precisions

    def is_as_written(self, workdir: Path) -> bool:
        """Whether the files are as a run of this work directory has left them."""
        return was_written(workdir, self.path)


class LineFiles:
    """The work: one file of requests, one of answers, one of failures."""

    units = "lines"
    starts_anew = False
    is_fixed = True

    def __init__(self, source: Path, out: Path) -> None:
        self._source = source
        self._output = LineOutput(out)
        self.name = f"the input {source}"
        self.results, self.failures = self._output.results, self._output.failures

    @property
    def workdir(self) -> Path:
        """`OUT.jsonl.work`."""
        return default_workdir(self._output.path)

    def check(self, workdir: Path, *, overwrite: bool) -> None:
        """Check the paths, and that the first bytes are no other format's."""
        try:
            check_paths(self._source, self._output.path, workdir)
            if not overwrite:
                check_overwrites(self._output.path, workdir)
            check_format(self._source)
        except UnusableInputError as error:
            raise UsageError(f"{self.name} {error}") from error
        except OSError as error:
            raise UsageError(f"{error.filename}: {error.strerror}") from error

    def prepare(self, model: ModelDirectory) -> None:
        """No-op: each line is checked by itself."""

    def identity(self) -> Mapping[str, str]:
        """Return the digest of the file."""
        return {"the input": file_digest(self._source)}

    def rows(self, most_bad_in_a_row: int) -> Iterator[NewRequest | RejectedRow]:
        """Yield the lines of the file."""
        try:
            with self._source.open("rb") as stream:
                yield from read_batch_lines(stream, most_bad_in_a_row)
        except UnusableInputError as error:
            raise UsageError(f"{self.name} {error}") from error

    def write(self, store: Store, job: Job, workdir: Path, *, overwrite: bool) -> set[str]:
        """Write successes and failures."""
        return self._output.write(store, job, workdir, overwrite=overwrite)

    def was_written(self, workdir: Path, job: Job) -> bool:
        """Whether the files are as an earlier run has left them."""
        del job  # a work directory is for one input
        return self._output.is_as_written(workdir)
