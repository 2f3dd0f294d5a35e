"""The report of one job: its timeline, its lengths, its bill, what was computed again and why."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from nightjar.jobs.records import Job, JsonObject
from nightjar.jobs.states import MicroBatchState, RequestKind
from nightjar.jobs.tallies import BIN_EDGES, Tally

TIME_BINS = 120


@dataclass(frozen=True, slots=True)
class ReportedMicroBatch:
    """What a report reads of a micro-batch; the moments are those of the processes' clocks."""

    kind: RequestKind
    bucket: int
    size: int
    state: MicroBatchState
    epoch: int
    attempts: int
    crashes: int
    worker_deaths: int
    isolated: bool
    fingerprint: str
    planned_at: datetime | None
    leased_at: datetime | None
    ended_at: datetime | None
    tally: Tally


@dataclass(frozen=True, slots=True)
class FailureSample:
    """One row that failed."""

    line: int
    custom_id: str | None
    message: str
    param: str | None


@dataclass(slots=True)
class FailureReason:
    """Rows that failed with one code, and some of them."""

    code: str
    count: int = 0
    samples: list[FailureSample] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FailureGroups:
    """Failures by reason, the most frequent first.

    counted: how many failures were read; complete: whether they are all.
    """

    reasons: Sequence[FailureReason]
    counted: int
    complete: bool


@dataclass(slots=True)
class Lane:
    """Micro-batches of one kind and bucket; `computing` holds rows at work, by bins of time."""

    kind: RequestKind
    bucket: int
    micro_batches: int = 0
    rows: int = 0
    computing: list[float] = field(default_factory=lambda: [0.0] * TIME_BINS)


@dataclass(slots=True)
class Recomputed:
    """What was computed again, and why.

    leases_taken_back: from workers that died or hung, or gave them back; claims_again: claims of
    what had been claimed before. crashes, worker_deaths: of what was computed alone. split: by a
    crash; suspects: rows computed alone. replanned: for other files of the model.
    in_higher_precision: rows whose scores were not finite. retried: failures that were tried again.
    """

    leases_taken_back: int = 0
    claims_again: int = 0
    crashes: int = 0
    worker_deaths: int = 0
    split: int = 0
    suspects: int = 0
    replanned: int = 0
    retried: int = 0
    in_higher_precision: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a probe has measured.

    copy_bytes_per_s: read and written bytes of copies. flops_per_s: of products in FP32.
    """

    copy_bytes_per_s: float
    flops_per_s: float
    threads: int


@dataclass(frozen=True, slots=True)
class SpeedLimit:
    """How long the computed tokens take at least, beside how long they took.

    weights: those that each token is multiplied with. memory_s: reading the weights once a step;
    arithmetic_s: two operations a weight and token, in FP32. share: the longer one of both, of the
    engine's seconds. Lower precisions compute faster than FP32 on some machines, so the share may
    exceed 1 there.
    """

    weights: int
    weight_bytes: int
    precision: str
    engine_s: float
    memory_s: float
    arithmetic_s: float
    share: float
    machine: Machine

    def as_json(self) -> JsonObject:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class JobReport:
    """All of it; `as_json` is what `--json` and the API give."""

    job: Job
    made_at: datetime
    begins_at: datetime
    bin_s: float
    planned: Sequence[float]  # rows in a micro-batch that nobody has claimed, at the end of a bin
    queued: Sequence[float]
    computing: Sequence[float]  # on average over the bin
    landed: Sequence[float]
    rates_begin_at: datetime  # the first claim
    rate_bin_s: float
    landed_in_bin: Sequence[int]  # of bins from there on
    tokens_in_bin: Sequence[int]
    lanes: Sequence[Lane]
    tally: Tally
    apart: int  # rows that ended without being computed: rejected, shared, known or stopped
    lease_s: float
    padding_avoided: int
    fingerprints: Mapping[str, int]  # micro-batches by the model's fingerprint
    recomputed: Recomputed
    failures: FailureGroups
    complete: bool  # every micro-batch was read
    untimed: int  # micro-batches of a version that noted no moments

    @property
    def prefilled_tokens(self) -> int:
        """Tokens of prompts, queries and documents that were computed."""
        read = self.tally
        return max(0, read.prompt_tokens - read.cached_tokens - read.pruned_tokens)

    def as_json(self) -> JsonObject:
        """Plain JSON values."""
        return {
            "object": "job.report",
            "made_at": self.made_at.isoformat(timespec="seconds"),
            "complete": self.complete,
            "job": _job(self.job),
            "timeline": self._timeline(),
            "lengths": {
                "edges": list(BIN_EDGES),
                "prompts": _listed(self.tally.prompts),
                "requested": _listed(self.tally.requested),
                "generated": _listed(self.tally.generated),
                "buckets": sorted({lane.bucket for lane in self.lanes}),
            },
            "bill": self._bill(),
            "finish_reasons": self.tally.finish_reasons,
            "failures": asdict(self.failures),
            "recomputed": asdict(self.recomputed),
            "versions": {
                "nightjar": self.tally.versions,
                "precisions": self.tally.precisions,
                "model_fingerprints": dict(self.fingerprints),
            },
        }

    def _timeline(self) -> JsonObject:
        return {
            "begins_at": self.begins_at.isoformat(timespec="milliseconds"),
            "bin_s": round(self.bin_s, 6),
            **{
                name: [round(value, 2) for value in getattr(self, name)]
                for name in ("queued", "planned", "computing", "landed")
            },
            "rates": {
                "begins_at": self.rates_begin_at.isoformat(timespec="milliseconds"),
                "bin_s": round(self.rate_bin_s, 6),
                "rows": list(self.landed_in_bin),
                "tokens": list(self.tokens_in_bin),
            },
            "lanes": [
                {
                    "kind": lane.kind.value,
                    "bucket": lane.bucket,
                    "micro_batches": lane.micro_batches,
                    "rows": lane.rows,
                    "computing": [round(value, 2) for value in lane.computing],
                }
                for lane in self.lanes
            ],
            "micro_batches_without_moments": self.untimed,
        }

    def _bill(self) -> JsonObject:
        read = self.tally
        return {
            "tenant": self.job.tenant,
            "schedule": self.job.metadata.get("schedule"),
            "rows_computed": read.rows - read.failed - read.reused,
            "rows_not_computed": self.apart + read.reused,
            "prompt_tokens": read.prompt_tokens,
            "prefilled_tokens": self.prefilled_tokens,
            "cached_tokens": read.cached_tokens,
            "decoded_tokens": read.completion_tokens,
            "requested_tokens": read.requested_tokens,
            "saved_by_stops_tokens": read.saved_tokens,
            "saved_by_pruning_tokens": read.pruned_tokens,
            "pruned_documents": read.pruned_documents,
            "reused_rows": self.job.reused,
            "reused_tokens": self.job.reused_tokens,
            "padding_avoided_tokens": self.padding_avoided,
            "engine_s": round(read.engine_s, 3),
            "engine_steps": round(read.steps),
            "lease_s": round(self.lease_s, 3),
        }


def _listed(counts: Mapping[int, int]) -> list[int]:
    """Counts by bin, as many as there are edges."""
    return [counts.get(index, 0) for index in range(len(BIN_EDGES))]


def _job(job: Job) -> dict[str, Any]:
    names = ("id", "model", "tenant", "priority", "total", "completed", "failed", "cancelled")
    moments = ("created_at", "started_at", "finished_at")
    shown: dict[str, Any] = {name: getattr(job, name) for name in names}
    shown["state"] = job.state.value
    shown["reused"] = job.reused
    shown["metadata"] = dict(job.metadata)
    for name in moments:
        moment = getattr(job, name)
        shown[name] = None if moment is None else moment.isoformat(timespec="milliseconds")
    return shown
