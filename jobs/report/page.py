"""Writes a report as one HTML file, without scripts; nothing of a row becomes markup."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup

from nightjar.jobs.job_report import JobReport, SpeedLimit
from nightjar.jobs.records import JsonObject
from nightjar.jobs.report.charts import (
    Series,
    areas,
    bars,
    duration,
    histogram,
    lanes,
    number,
)
from nightjar.jobs.report.shell import render_page, write_page
from nightjar.jobs.tallies import BIN_EDGES
from nightjar.visible import visible

_STAGES = (
    ("landed", "landed"),
    ("computing", "computing"),
    ("planned", "planned: in a micro-batch that no worker has claimed"),
    ("queued", "queued"),
)
_AGAIN = {
    "leases_taken_back": "leases of micro-batches were taken or given back",
    "claims_again": "claims were of a micro-batch that had been claimed before",
    "crashes": "crashes of the compute process, beside a row computed alone",
    "worker_deaths": "deaths of a worker, beside a row computed alone",
    "split": "micro-batches were split after a crash",
    "suspects": "rows were computed alone after a crash, summed over the attempts",
    "replanned": "rows were planned again for other files of the model",
    "retried": "failures were tried again by hand",
}
NOT_MEASURED = (
    "Not measured: this report was not made on the machine of the run. `nightjar run` measures it "
    "when it ends."
)


@dataclass(frozen=True, slots=True)
class ReportContext:
    """What a report tells beside the job.

    title: what the run is of; versions: names and values; limit: None where it is not known.
    """

    title: str
    versions: Mapping[str, str] = field(default_factory=dict)
    limit: SpeedLimit | None = None
    no_limit: str = NOT_MEASURED


def report_json(report: JobReport, context: ReportContext) -> JsonObject:
    """The report as JSON values."""
    found = report.as_json()
    found["versions"] |= dict(context.versions)
    found["limit"] = None if context.limit is None else context.limit.as_json()
    return found


def write_report(path: Path, report: JobReport, context: ReportContext) -> None:
    """Write the page; who reads `path` meanwhile sees the old or the new whole. Raises OSError."""
    write_page(path, render_report(report, context))


def render_report(report: JobReport, context: ReportContext) -> str:
    """Return the page."""
    return render_page(
        "report.html.j2",
        report=report,
        job=report.job,
        state=report.job.state.value,
        title=visible(context.title),
        schedule=report.job.metadata.get("schedule"),
        cards=_cards(report),
        stages=_STAGES,
        bill=_bill(report),
        again=_again(report),
        versions=_versions(report, context.versions),
        limit=context.limit,
        no_limit=context.no_limit,
        **_charts(report),
    )


def _charts(report: JobReport) -> dict[str, Markup]:
    seconds = report.bin_s * len(report.landed)
    series = [Series(name, style, getattr(report, style)) for style, name in _STAGES]
    tally = report.tally
    counted = {
        name: [counts.get(n, 0) for n in range(len(BIN_EDGES))]
        for name, counts in (
            ("requested", tally.requested),
            ("generated", tally.generated),
            ("prompts", tally.prompts),
        )
    }
    answers = [
        Series("requested", "second", counted["requested"]),
        Series("generated", "main", counted["generated"]),
    ]
    buckets = sorted({lane.bucket for lane in report.lanes})
    named = [(f"{lane.kind.value} {lane.bucket:,}", lane.computing) for lane in report.lanes]
    return {
        "timeline": areas(series, seconds, "Rows by state over time"),
        "lanes": lanes(named, seconds, "Rows computed over time, by kind and bucket"),
        "row_rate": _rate(report, report.landed_in_bin, "rows/s"),
        "token_rate": _rate(report, report.tokens_in_bin, "tokens/s"),
        "answers": histogram(BIN_EDGES, answers, "Requested and generated lengths"),
        "prompts": histogram(
            BIN_EDGES,
            [Series("prompts", "main", counted["prompts"])],
            "Lengths of prompts",
            buckets,
        ),
    }


def _rate(report: JobReport, values: Sequence[int], unit: str) -> Markup:
    rates = [value / report.rate_bin_s for value in values]
    return bars(rates, "main", report.rate_bin_s * len(rates), f"{unit} over time", unit)


def _cards(report: JobReport) -> list[tuple[str, str]]:
    job = report.job
    cards = [
        (number(job.total), "rows"),
        (number(job.completed), "succeeded"),
        (number(job.failed + job.cancelled), "failed or not computed"),
    ]
    if job.started_at is not None:
        spent = ((job.finished_at or report.made_at) - job.started_at).total_seconds()
        waited = (job.started_at - job.created_at).total_seconds()
        cards += [(duration(spent), "from the first claim on"), (duration(waited), "waited before")]
        if spent > 0:
            cards.append((number(job.ended / spent), "rows a second"))
    return cards


def _bill(report: JobReport) -> list[tuple[str, str, str]]:
    tally, job = report.tally, report.job
    rows: list[tuple[str, float, str]] = [
        ("tokens prefilled", report.prefilled_tokens, "of prompts, queries and documents"),
        ("tokens from the prefix cache", tally.cached_tokens, "not computed again"),
        ("tokens decoded", tally.completion_tokens, f"of {number(tally.requested_tokens)} asked"),
        ("tokens saved by stops", tally.saved_tokens, "asked for, and not needed"),
        (
            "tokens saved by pruning",
            tally.pruned_tokens,
            f"of {number(tally.pruned_documents)} documents that could not be among the best",
        ),
        (
            "tokens of padding avoided",
            report.padding_avoided,
            "prompts are packed: none was filled up to its bucket",
        ),
        ("answers shared or known", job.reused, f"{number(job.reused_tokens)} tokens"),
    ]
    listed = [(name, number(value), note) for name, value, note in rows]
    total = report.prefilled_tokens + tally.completion_tokens
    speed = f"{number(total / tally.engine_s)} tokens a second" if tally.engine_s > 0 else ""
    listed.append(("device seconds", duration(tally.engine_s), speed))
    listed.append(("engine steps", number(round(tally.steps)), "this job's share of them"))
    listed.append(("tenant", visible(job.tenant), ""))
    if "schedule" in job.metadata:
        listed.append(("schedule", visible(job.metadata["schedule"]), ""))
    return listed


def _again(report: JobReport) -> list[tuple[int, str]]:
    again = report.recomputed
    found = [(getattr(again, name), text) for name, text in _AGAIN.items() if getattr(again, name)]
    for precision, count in sorted(again.in_higher_precision.items()):
        found.append(
            (count, f"rows were computed again in {visible(precision)}: scores were not finite")
        )
    return found


def _versions(report: JobReport, more: Mapping[str, str]) -> list[tuple[str, str]]:
    tally = report.tally
    found = [
        ("Nightjar of the workers", _counts(tally.versions)),
        ("model", report.job.model),
        ("fingerprint of the model", ", ".join(report.fingerprints)),
        ("precision", _counts(tally.precisions)),
        *more.items(),
    ]
    return [(name, value) for name, value in found if value]


def _counts(counts: Mapping[str, int]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} ({count} rows)" for name, count in sorted(counts.items()))
