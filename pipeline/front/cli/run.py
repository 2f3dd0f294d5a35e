"""`nightjar run`: a whole file, or a task, on this machine."""

import os
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn, get_args

import typer

from nightjar.compute_config import Dtype
from nightjar.pipeline.front.cli.console import (
    EXIT_NO_ROW_SUCCEEDED,
    EXIT_ROWS_FAILED,
    EXIT_RUN,
    EXIT_USAGE,
    STOPPED,
    AsJson,
    Device,
    Devices,
    Input,
    PromptVectors,
    Shards,
    Verify,
    end_interrupted,
    errors,
    fail,
    is_task_file,
    named_files,
    print_json,
    read_settings,
    require_one_device_option,
)

if TYPE_CHECKING:
    from nightjar.jobs.records import JsonObject
    from nightjar.pipeline.embedded.run import RunArguments
    from nightjar.pipeline.embedded.summary import RunSummary
    from nightjar.pipeline.embedded.work import Work

Model = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="A Hugging Face model directory (default: the task's)."),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="OUT.jsonl", help="Results; failures go to OUT.errors.jsonl."),
]
AnyDtype = Annotated[
    str,
    typer.Option(
        help="auto (the fastest that is safe), fp64, fp32, bf16, fp16, int8 (on a CPU) or fp8 "
        "(on a GPU)."
    ),
]
WorkDirectory = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="State of the run (default: OUT.jsonl.work or TASK.toml.work)."
    ),
]
Retry = Annotated[
    bool,
    typer.Option("--retry", help="Compute rows again that failed by no fault of their own."),
]
AcceptAnyModel = Annotated[
    bool,
    typer.Option("--accept-any-model", help="Compute lines that name another model, too."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace output files that hold something else.")
]
NoReport = Annotated[
    bool, typer.Option("--no-report", help="Write no report into the work directory.")
]
Receipts = Annotated[
    bool, typer.Option("--receipts", help="Write into each answer what it was computed with.")
]
ReuseResults = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Keep answers in this file, and reuse those of earlier runs (default: the task's).",
    ),
]
_ENDING = (signal.SIGINT, signal.SIGTERM)


def run(  # noqa: PLR0913, PLR0917 - one for each option
    source: Input,
    model: Model = None,
    out: Out = None,
    dtype: AnyDtype = "auto",
    device: Device = None,
    workdir: WorkDirectory = None,
    prompt_vector: PromptVectors = None,
    shards: Shards = None,
    devices: Devices = None,
    retry: Retry = False,
    accept_any_model: AcceptAnyModel = False,
    overwrite: Overwrite = False,
    reuse_results: ReuseResults = None,
    no_report: NoReport = False,
    verify: Verify = None,
    receipts: Receipts = False,
    as_json: AsJson = False,
) -> None:
    """Compute a file or a task on this machine; run it again to continue where it stopped.

    Exit status: 0 every row succeeded, 1 the run could not continue, 2 unusable arguments,
    3 some rows failed, 4 no row succeeded.

    Example: nightjar run task.toml --reuse-results answers.db
    """
    from nightjar.pipeline.embedded.run import RunArguments

    if dtype not in get_args(Dtype):
        fail(f"--dtype {dtype!r}: use one of {', '.join(get_args(Dtype))}", EXIT_USAGE)
    require_one_device_option(device, devices)
    if device is not None:
        os.environ["NIGHTJAR_DEVICE"] = device
    if receipts:
        os.environ["NIGHTJAR_RECEIPTS"] = "true"
    if verify is not None:
        os.environ["NIGHTJAR_VERIFY"] = verify
    vectors = named_files(prompt_vector or [])
    work, model, vectors, kept = _work(source, model, out, vectors)
    arguments = RunArguments(
        work=work,
        model=model,
        dtype=dtype,
        workdir=workdir,
        prompt_vectors=vectors,
        retry=retry,
        overwrite=overwrite,
        accept_any_model=accept_any_model,
        reuse_results=reuse_results or kept,
        shards=shards,
        devices=devices,
    )
    summary = _compute(arguments)
    report = None if no_report else _report(arguments, summary)
    if as_json:
        print_json(_told(summary, report), as_json=True)
    _exit(summary)


def _work(
    source: Path, model: Path | None, out: Path | None, vectors: dict[str, Path]
) -> "tuple[Work, Path, dict[str, Path], Path | None]":
    """Return what is computed, with which model and vectors, and the file of earlier answers."""
    if not is_task_file(source):
        from nightjar.pipeline.embedded.line_files import LineFiles

        if model is None or out is None:
            missing = "--model DIR" if model is None else "--out OUT.jsonl"
            fail(f"give {missing}: a file of batch lines does not name it", EXIT_USAGE)
        return LineFiles(source, out), model, vectors, None
    from nightjar.pipeline.front.cli.tasks import open_task, task_answers, task_model, task_vectors

    file = open_task(source)
    from nightjar.pipeline.front.task_work import TaskWork

    of_both = task_vectors(file) | vectors
    work = TaskWork(file, out, os.environ)
    return work, task_model(file, model), of_both, task_answers(file)


def _compute(arguments: "RunArguments") -> "RunSummary":
    """Run to the end and show the progress; end the command where the run cannot continue."""
    from nightjar.pipeline.embedded.run import run as run_embedded
    from nightjar.pipeline.embedded.work import RunError
    from nightjar.pipeline.embedded.workdir import UsageError
    from nightjar.pipeline.front.progress import ProgressView, print_summary

    interrupts = Interrupts()
    for number in _ENDING:
        signal.signal(number, interrupts)
    try:
        with ProgressView(errors, before_each=interrupts.check) as view:
            summary = run_embedded(arguments, view)
    except UsageError as error:
        fail(str(error), EXIT_USAGE)
    except RunError as error:
        fail(str(error), EXIT_RUN)
    except KeyboardInterrupt as interrupt:
        end_interrupted(STOPPED, interrupt.args[0])
    print_summary(errors, summary)
    return summary


def _report(arguments: "RunArguments", summary: "RunSummary") -> Path | None:
    """Write the report of a run, and name it; None where it cannot be written."""
    from nightjar.pipeline.front.run_report import write_run_report

    settings = read_settings()
    path = write_run_report(
        arguments.workdir or arguments.work.workdir,
        summary,
        arguments.model,
        on_cpu=settings.device == "cpu" and not (arguments.devices or settings.devices),
        threads=settings.compute_threads,
    )
    if path is not None:
        errors.print(f"report: {path}", highlight=False, markup=False)
    return path


def _told(summary: "RunSummary", report: Path | None) -> "JsonObject":
    """Return what a program is told of a run that has ended."""
    job = summary.job
    return {
        "state": job.state.value,
        "rows": job.total,
        "succeeded": job.completed,
        "failed": job.failed + job.cancelled,
        "reused": job.reused,
        "resumed": summary.resumed,
        "was_finished": summary.was_finished,
        "seconds": round(summary.seconds, 3),
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": job.completion_tokens,
        "results": summary.out,
        "failures": summary.errors,
        "report": None if report is None else str(report),
    }


def _exit(summary: "RunSummary") -> None:
    """End the command with the exit status for the rows' outcomes."""
    if not summary.job.completed:
        told = f"none of the {summary.job.total} rows succeeded"
        if summary.first_failure is not None:
            told += f"; the first failure: {summary.first_failure}"
        fail(told, EXIT_NO_ROW_SUCCEEDED)
    if summary.job.failed or summary.job.cancelled:
        raise typer.Exit(EXIT_ROWS_FAILED)


class Interrupts:
    """Ends a run after Ctrl-C or TERM: services end in order, the state is kept.

    Python drops an exception that comes up in the hook of a fork or in a finalizer. The run then
    goes on, so it also checks from time to time whether it was asked to end.
    """

    def __init__(self) -> None:
        self._asked: int | None = None

    def __call__(self, number: int, _: FrameType | None) -> NoReturn:
        """Handle the signal; raises KeyboardInterrupt with its number."""
        self._asked = number
        raise KeyboardInterrupt(number)

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come."""
        if self._asked is not None:
            raise KeyboardInterrupt(self._asked)
