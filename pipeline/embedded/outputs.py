"""The output files of a run, written when its job is over."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from nightjar.jobs.records import ResultRecord
from nightjar.jobs.store import Store
from nightjar.jobs.store.result_rows import Outcome
from nightjar.pipeline.embedded.workdir import (
    UsageError,
    check_overwrites,
    note_writing,
    note_written,
    output_paths,
)
from nightjar.pipeline.files.formats import write_results


class RunError(Exception):
    """The run cannot continue now; landed results are kept, and the same command resumes it."""


def write_outputs(store: Store, job_id: str, out: Path, workdir: Path, overwrite: bool) -> set[str]:
    """Write successes and failures; return the precisions that the answers were computed in.

    Raises:
        RunError: A file cannot be written, or would replace a file that no run has written.
    """
    paths = output_paths(out)
    outcomes: list[tuple[Path, Outcome]] = [(paths[0], "succeeded"), (paths[1], "failed")]
    if not overwrite:
        try:  # again: a file may have been put there while the run computed
            check_overwrites(out, workdir)
        except UsageError as error:
            raise RunError(f"{error}; the results are kept in {workdir}") from error
    note_writing(workdir, out)
    precisions: set[str] = set()
    for path, outcome in outcomes:
        try:
            results = store.results.iterate(job_id, outcome=outcome)
            write_results(path, _noting_precisions(results, precisions))
        except OSError as error:
            raise RunError(
                f"{path} cannot be written: {error.strerror}; the results are kept in "
                f"{workdir}: run the same command again to write them"
            ) from error
    note_written(workdir, out)
    return precisions


def _noting_precisions(
    results: Iterable[ResultRecord], precisions: set[str]
) -> Iterator[ResultRecord]:
    for result in results:
        if result.body is not None and "precision" in result.body:
            precisions.add(result.body["precision"])
        yield result
