"""The report that `nightjar run` writes when it ends."""

import hashlib
import logging
import platform
import subprocess
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from nightjar.checkpoints import CheckpointError, ModelDirectory
from nightjar.jobs.errors import JobError
from nightjar.jobs.job_report import JobReport, SpeedLimit
from nightjar.jobs.report.page import ReportContext, write_report
from nightjar.jobs.store import Store
from nightjar.pipeline.embedded.summary import RunSummary
from nightjar.pipeline.embedded.workdir import database_path, sqlite_url

logger = logging.getLogger(__name__)

REPORT_NAME = "report.html"


def write_run_report(
    workdir: Path, summary: RunSummary, model: Path, *, on_cpu: bool, threads: int | None
) -> Path | None:
    """Write the report into the work directory; None where it cannot be written.

    A run that has its results does not fail for want of a report.

    Args:
        workdir: Of the run, which has ended.
        summary: How it ended.
        model: The directory of its model.
        on_cpu: Whether the model was computed on the CPU, whose limit is then measured.
        threads: CPU threads of the engine; None for all.
    """
    path = workdir / REPORT_NAME
    if summary.was_finished and path.is_file():
        return path
    try:
        opened = ModelDirectory.open(model)
        with closing(Store(sqlite_url(database_path(workdir)))) as store:
            report = store.reports.of_job(summary.job.id)
        limit, why = _limit(report, opened, on_cpu=on_cpu, threads=threads)
        context = ReportContext(summary.out, _versions(opened), limit, why)
        write_report(path, report, context)
    except (CheckpointError, JobError, OSError) as error:
        logger.warning("no report: %s", error, extra={"action": "report_failed"})
        return None
    return path


def _limit(
    report: JobReport, model: ModelDirectory, *, on_cpu: bool, threads: int | None
) -> tuple[SpeedLimit | None, str]:
    if not report.tally.engine_s:
        return None, "Not measured: no row was computed."
    if not on_cpu:
        return None, "Not measured: the probe measures a CPU, and the model was computed on a GPU."
    from nightjar.pipeline.front.speed_limits import (  # noqa: PLC0415 - numpy
        computed_precision,
        probe,
        speed_limit,
    )

    if computed_precision(report) is None:
        return None, "Not measured: the engine made its answers up, without a model."
    try:
        return speed_limit(report, model, probe(threads)), ""
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"Not measured: the probe of the machine failed: {type(error).__name__}."


def _versions(model: ModelDirectory) -> dict[str, str]:
    tokenizer = (model.path / "tokenizer.json").read_bytes()
    found = {
        "directory of the model": str(model.path),
        "family of the model": model.config.family,
        "tokenizer.json (SHA-256)": hashlib.sha256(tokenizer).hexdigest(),
        "Python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {_processor()}",
    }
    for package in ("torch", "celery", "cupy-cuda13x"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "a processor without a name"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()
