"""What a person reads while a job is computed, where standard error is no terminal."""

import contextlib
import signal
from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO

import pytest
from rich.console import Console

from nightjar.jobs.records import Job
from nightjar.jobs.states import JobState
from nightjar.pipeline.embedded.summary import RunSummary
from nightjar.pipeline.front import progress
from nightjar.pipeline.front.cli.run import Interrupts
from nightjar.pipeline.front.progress import ProgressView, print_summary

MOMENT = datetime(2026, 11, 23, tzinfo=UTC)
JOB = Job(
    id="job",
    state=JobState.RUNNING,
    model="tiny",
    total=10,
    completed=0,
    failed=0,
    cancelled=0,
    cancel_requested=False,
    expired=False,
    prompt_tokens=0,
    completion_tokens=0,
    requested_tokens=0,
    saved_tokens=0,
    metadata={},
    tenant="default",
    created_at=MOMENT,
    started_at=None,
    finished_at=None,
    expires_at=None,
    priority=0,
    reused=0,
    reused_tokens=0,
)
HALF = replace(JOB, completed=4, failed=1)
DONE = replace(JOB, completed=7, failed=2, cancelled=1, finished_at=MOMENT)
SUMMARY = RunSummary(
    job=DONE,
    out="out.jsonl",
    errors="out.errors.jsonl",
    was_finished=False,
    resumed=4,
    seconds=2.0,
    engine_s=0.5,
    load_s=0.25,
    first_failure="line 3: no prompt",
    precisions=["bf16"],
)


def console() -> Console:
    return Console(file=StringIO(), width=200)


def written(to: Console) -> list[str]:
    """The lines so far, as they stand there: neither wrapped nor coloured."""
    assert isinstance(to.file, StringIO)
    return to.file.getvalue().splitlines()


def summed_up(summary: RunSummary) -> list[str]:
    to = console()
    print_summary(to, summary)
    return written(to)


def test_what_is_noticed_is_printed_as_it_is() -> None:
    to = console()
    with ProgressView(to) as view:
        view.noticed("the [gpu] worker was started again")
    assert written(to) == ["the [gpu] worker was started again"]


def test_a_run_that_goes_on_says_from_where() -> None:
    to = console()
    with ProgressView(to) as view:
        view.submitted(HALF, resumed=False)
        view.submitted(DONE, resumed=True)
        view.submitted(HALF, resumed=True)
    assert written(to) == ["continuing: 5 of 10 requests are already done"]


def test_a_line_every_ten_seconds_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    to = console()
    with ProgressView(to) as view:
        view.submitted(HALF, resumed=True)
        for _ in range(20):
            now += 1.0
            view.progressed(replace(HALF, completed=9))
    assert written(to)[1:] == [
        "10 of 10 requests, 0.5 requests/s",
        "10 of 10 requests, 0.2 requests/s",
    ]


def test_the_summary_of_a_run() -> None:
    assert summed_up(SUMMARY) == [
        "6 requests in 2.0 s (3.0/s, start-up included): 7 succeeded, 3 failed",
        "time: 0.50 s in the engine, 0.25 s loading the model, 1.25 s else",
        "precision: bf16",
        "results: out.jsonl",
        "failures: out.errors.jsonl",
        "the first: line 3: no prompt",
    ]


def test_the_summary_says_what_was_saved() -> None:
    saved = replace(
        DONE, reused=3, reused_tokens=40, completion_tokens=60, requested_tokens=90, saved_tokens=30
    )
    assert summed_up(replace(SUMMARY, job=saved))[3:5] == [
        "3 answers were shared with equal requests: 40 tokens not computed again",
        "the answers hold 60 of 90 requested tokens: 30 saved by early stop",
    ]


def test_the_summary_leaves_out_what_there_is_nothing_to_say_of() -> None:
    good = replace(DONE, completed=10, failed=0, cancelled=0)
    bare = replace(SUMMARY, job=good, engine_s=0.0, precisions=[], first_failure=None)
    assert summed_up(bare) == [
        "6 requests in 2.0 s (3.0/s, start-up included): 10 succeeded, 0 failed",
        "results: out.jsonl",
    ]
    assert summed_up(replace(bare, was_finished=True)) == [
        "already finished: nothing to do; the results are in out.jsonl"
    ]


@pytest.mark.parametrize(("failed", "cancelled"), [(10, 0), (0, 10)])
def test_where_nothing_succeeded_the_command_says_why_and_not_the_summary(
    failed: int, cancelled: int
) -> None:
    job = replace(DONE, completed=0, failed=failed, cancelled=cancelled)
    assert summed_up(replace(SUMMARY, job=job))[-1] == "failures: out.errors.jsonl"


def test_an_interrupt_that_python_dropped_ends_the_run_at_the_next_progress() -> None:
    interrupts = Interrupts()
    view = ProgressView(Console(file=StringIO()), before_each=interrupts.check)
    view.progressed(JOB)
    with contextlib.suppress(KeyboardInterrupt):  # as in the hook of a fork
        interrupts(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt) as raised:
        view.progressed(JOB)
    assert raised.value.args == (signal.SIGINT,)
