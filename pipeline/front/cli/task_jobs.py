"""`nightjar submit task.toml`: the rows of a task as a job of a deployment."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from nightjar.pipeline.front.cli.console import (
    EXIT_RUN,
    EXIT_USAGE,
    STOPPED,
    end_interrupted,
    fail,
    print_json,
    say,
)
from nightjar.pipeline.front.cli.deployment import connect, exit_by_outcome, tell_submitted, watched
from nightjar.pipeline.front.cli.tasks import open_task
from nightjar.pipeline.settings import Settings

if TYPE_CHECKING:
    from nightjar.pipeline.client.options import SubmitOptions
    from nightjar.pipeline.client.records import JobStatus
    from nightjar.pipeline.front.task_work import TaskWork
    from nightjar.pipeline.tables.sinks.sink import SinkCounts


def submit_task(
    source: Path, api_url: str, options: "SubmitOptions", *, watch: bool, as_json: bool
) -> None:
    """Submit a task, or go on with its job; with `watch`, write the answers into its sink."""
    from nightjar.pipeline.embedded.work import RunError
    from nightjar.pipeline.embedded.workdir import UsageError

    if options.get("idempotency_key") is not None:
        fail("--key: a task has a key of its own; leave it out", EXIT_USAGE)
    try:
        found = _submitted(source, api_url, options, watch=watch, as_json=as_json)
    except UsageError as error:
        fail(str(error), EXIT_USAGE)
    except RunError as error:
        fail(str(error), EXIT_RUN)
    except OSError as error:
        fail(f"{error.filename or source}: {error.strerror}; run the same command again", EXIT_RUN)
    except KeyboardInterrupt:
        end_interrupted(STOPPED)
    exit_by_outcome(found, watch=watch)


def _submitted(
    source: Path, api_url: str, options: "SubmitOptions", *, watch: bool, as_json: bool
) -> "JobStatus":
    file = open_task(source)
    from nightjar.pipeline.embedded.workdir import UsageError, locked_workdir
    from nightjar.pipeline.front.task_submit import TaskSubmission, deployed_model
    from nightjar.pipeline.front.task_work import TaskWork

    if file.task.sink is None:
        raise UsageError(f"{source} has no [sink]; add one, where the answers are to be written")
    work = TaskWork(file, None, os.environ)
    work.check(work.workdir, overwrite=False)
    name, model = deployed_model(file.task.model, file.folder)
    work.prepare(model)
    with locked_workdir(work.workdir), connect(api_url) as client:
        submission = TaskSubmission(work, client, work.workdir)
        most_bad = Settings.read().bad_lines_in_a_row
        job = submission.submit(options.get("model") or name, most_bad, options)
        found = tell_submitted(job, as_json=as_json, shows=not watch)
        if watch:
            found = watched(job, as_json=as_json)
            counts = submission.write(job, found)
            if not as_json:
                print_json(found.raw, as_json=False)
            say(_summary(counts, found, work))
    return found


def _summary(counts: "SinkCounts", found: "JobStatus", work: "TaskWork") -> str:
    told = f"{counts.succeeded} rows succeeded, {counts.failed + counts.left_out} failed"
    if found.counts.reused:
        told += f"; {found.counts.reused} answers were known or shared with equal rows"
    told += f"; results: {work.results}"
    return f"{told}; failures: {work.failures}" if counts.failed + counts.left_out else told
