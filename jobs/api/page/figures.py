"""What the charts of a job show: speed over time, and distributions of lengths."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nightjar.jobs.overview_records import LandedPoint, LengthSample, Stages
from nightjar.jobs.records import Job
from nightjar.jobs.states import MicroBatchState

_MOST_BINS = 28
_NICE = (1, 2, 4, 5, 8, 10)


@dataclass(frozen=True, slots=True)
class BucketRow:
    """Rows of one kind and bucket by stage."""

    kind: str
    bucket: int
    planned: int
    computing: int
    landed: int

    @property
    def rows(self) -> int:
        """All of them."""
        return self.planned + self.computing + self.landed


@dataclass(frozen=True, slots=True)
class StageView:
    """Rows of a job by stage; `queued` are in no micro-batch yet, `ended` have their outcome."""

    buckets: Sequence[BucketRow]
    queued: int
    planned: int
    computing: int
    ended: int
    truncated: bool

    @property
    def most(self) -> int:
        """The rows of the largest bucket."""
        return max((one.rows for one in self.buckets), default=0)


def stage_view(job: Job, stages: Stages) -> StageView:
    """Where the rows of a job stand."""
    rows: dict[tuple[str, int], dict[MicroBatchState, int]] = {}
    for one in stages.counts:
        of_bucket = rows.setdefault((one.kind.value, one.bucket), {})
        of_bucket[one.state] = of_bucket.get(one.state, 0) + one.rows
    buckets = [
        BucketRow(
            kind,
            bucket,
            found.get(MicroBatchState.READY, 0) + found.get(MicroBatchState.DISPATCHED, 0),
            found.get(MicroBatchState.LEASED, 0),
            found.get(MicroBatchState.DONE, 0),
        )
        for (kind, bucket), found in sorted(rows.items())
    ]
    planned, computing = sum(b.planned for b in buckets), sum(b.computing for b in buckets)
    queued = max(0, job.total - job.ended - planned - computing)
    return StageView(buckets, queued, planned, computing, job.ended, stages.truncated)


def speed(job: Job, landed: Sequence[LandedPoint]) -> dict[str, list[float]]:
    """Seconds since the first claim, rows that have landed by then, and rows a second before."""
    begun = job.started_at or job.created_at
    seconds, rows, rates = [0.0], [0.0], [0.0]
    for point in landed:
        at = (point.at - begun).total_seconds()
        count = point.position + 1.0
        # Points of one moment are one: between them no speed can be said.
        if at - seconds[-1] < 1e-3:
            rows[-1] = max(rows[-1], count)
        else:
            seconds.append(at)
            rows.append(count)
            rates.append(0.0)
        if len(rows) > 1:
            rates[-1] = (rows[-1] - rows[-2]) / (seconds[-1] - seconds[-2])
    if len(rates) > 1:
        rates[0] = rates[1]
    return {"seconds": seconds, "rows": rows, "rates": rates}


def lengths(sample: LengthSample, buckets: Sequence[int]) -> dict[str, Any]:
    """Histograms: requested and generated tokens of generations, prompt tokens of all rows."""
    asked = [row.requested for row in sample.rows if row.requested]
    made = [row.generated for row in sample.rows if row.requested]
    prompts = [row.prompt for row in sample.rows]
    edges = _edges(max([*asked, *made], default=0))
    prompt_edges = _edges(max(prompts, default=0))
    return {
        "edges": edges,
        "requested": _histogram(asked, edges),
        "generated": _histogram(made, edges),
        "prompt_edges": prompt_edges,
        "prompts": _histogram(prompts, prompt_edges),
        "buckets": [one for one in sorted(set(buckets)) if one <= prompt_edges[-1]],
        "mean_requested": _mean(asked),
        "mean_generated": _mean(made),
        "mean_prompt": _mean(prompts),
        "generations": len(asked),
        "rows": len(prompts),
    }


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None


def _edges(longest: int) -> list[int]:
    """Edges of bins from 0, of a round width."""
    least = max(1, math.ceil((longest + 1) / _MOST_BINS))
    power = 10 ** math.floor(math.log10(least))
    width = next(power * nice for nice in _NICE if power * nice >= least)
    return list(range(0, longest + 1 + width, width))


def _histogram(values: Sequence[int], edges: Sequence[int]) -> list[int]:
    counts = [0] * (len(edges) - 1)
    width = edges[1] - edges[0]
    for value in values:
        counts[value // width] += 1
    return counts
