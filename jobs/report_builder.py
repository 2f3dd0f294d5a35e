"""Builds the report of a job from the rows of its micro-batches, one after the other.

So a report of a million rows takes as much memory as one of a hundred.
"""

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta

from nightjar.jobs.job_report import (
    TIME_BINS,
    FailureGroups,
    JobReport,
    Lane,
    Recomputed,
    ReportedMicroBatch,
)
from nightjar.jobs.records import Job
from nightjar.jobs.states import MicroBatchState, RequestKind
from nightjar.jobs.tallies import Tally

_MOST_LANES = 64  # kinds and buckets; a bucket is a power of two
_UNDONE = frozenset({MicroBatchState.SPLIT, MicroBatchState.REPLANNED})


class ReportBuilder:
    """Adds up micro-batches, in any order, into a report."""

    def __init__(self, job: Job, made_at: datetime, retried: int = 0) -> None:
        self._job = job
        self._made_at = made_at
        self._begins_at = job.created_at
        ends_at = max(job.finished_at or made_at, job.created_at + timedelta(milliseconds=1))
        self._bin_s = (ends_at - job.created_at).total_seconds() / TIME_BINS
        self._rates_begin_at = min(job.started_at or job.created_at, ends_at)
        active_s = max((ends_at - self._rates_begin_at).total_seconds(), 1e-3)
        self._rate_bin_s = active_s / TIME_BINS
        # Changes at the end of each bin; the last one takes what the clocks put behind the end.
        self._planned, self._leased, self._ended = ([0] * TIME_BINS for _ in range(3))
        self._rows_in_bin, self._tokens_in_bin = [0] * TIME_BINS, [0] * TIME_BINS
        self._lanes: dict[tuple[RequestKind, int], Lane] = {}
        self._tally = Tally()
        self._fingerprints: dict[str, int] = defaultdict(int)
        self._again = Recomputed(retried=retried)
        self._lease_s = 0.0
        self._padding = 0
        self._untimed = 0

    def add(self, one: ReportedMicroBatch) -> None:
        """Count a micro-batch."""
        self._tally.add(one.tally)
        if one.fingerprint:
            self._fingerprints[one.fingerprint] += 1
        self._count_again(one)
        if one.kind is RequestKind.GENERATE:
            rows = sum(one.tally.prompts.values())
            self._padding += max(0, rows * one.bucket - one.tally.prompt_tokens)
        lane = self._lane(one)
        lane.micro_batches += 1
        lane.rows += one.tally.rows
        if one.planned_at is None:
            self._untimed += 1
            return
        self._time(one, lane)

    def built(self, failures: FailureGroups, *, complete: bool) -> JobReport:
        """The report of what was added."""
        timed = _summed(self._planned)
        leased, ended = _summed(self._leased), _summed(self._ended)
        computed_in = [0.0] * TIME_BINS
        for lane in self._lanes.values():
            for index, rows in enumerate(lane.computing):
                computed_in[index] += rows
        apart = max(0, self._job.ended - self._tally.rows)
        total = max(self._job.total - apart, timed[-1])
        computing = [min(rows, total - done) for rows, done in zip(computed_in, ended, strict=True)]
        planned = [
            max(0.0, min(all_ - held, total - done - rows))
            for all_, held, done, rows in zip(timed, leased, ended, computing, strict=True)
        ]
        queued = [
            max(0.0, total - done - rows - waiting)
            for done, rows, waiting in zip(ended, computing, planned, strict=True)
        ]
        self._again.in_higher_precision = dict(self._tally.recomputed_in)
        lanes = sorted(self._lanes.values(), key=lambda lane: (lane.kind, lane.bucket))
        return JobReport(
            job=self._job,
            made_at=self._made_at,
            begins_at=self._begins_at,
            bin_s=self._bin_s,
            planned=planned,
            queued=queued,
            computing=computing,
            landed=ended,
            rates_begin_at=self._rates_begin_at,
            rate_bin_s=self._rate_bin_s,
            landed_in_bin=self._rows_in_bin,
            tokens_in_bin=self._tokens_in_bin,
            lanes=lanes,
            tally=self._tally,
            apart=apart,
            lease_s=self._lease_s,
            padding_avoided=self._padding,
            fingerprints=self._fingerprints,
            recomputed=self._again,
            failures=failures,
            complete=complete,
            untimed=self._untimed,
        )

    def _lane(self, one: ReportedMicroBatch) -> Lane:
        key = (one.kind, one.bucket)
        if key not in self._lanes and len(self._lanes) >= _MOST_LANES:
            key = (one.kind, 0)
        return self._lanes.setdefault(key, Lane(*key))

    def _count_again(self, one: ReportedMicroBatch) -> None:
        again = self._again
        again.leases_taken_back += one.epoch
        again.claims_again += max(0, one.attempts - 1)
        again.crashes += one.crashes
        again.worker_deaths += one.worker_deaths
        again.split += one.state is MicroBatchState.SPLIT
        again.suspects += one.size if one.isolated else 0
        again.replanned += one.size if one.state is MicroBatchState.REPLANNED else 0

    def _time(self, one: ReportedMicroBatch, lane: Lane) -> None:
        """Enter the moments; what is planned again elsewhere leaves its states here."""
        landed = one.tally.rows
        moved = one.size - landed if one.state in _UNDONE else 0
        self._planned[self._bin(one.planned_at)] += one.size
        if one.leased_at is not None:
            self._leased[self._bin(one.leased_at)] += one.size
            self._occupy(lane, one.leased_at, one.ended_at or self._made_at, one.size)
        if one.ended_at is None:
            return
        end = self._bin(one.ended_at)
        self._ended[end] += landed
        active_s = (one.ended_at - self._rates_begin_at).total_seconds()
        rate_bin = min(max(int(active_s / self._rate_bin_s), 0), TIME_BINS - 1)
        self._rows_in_bin[rate_bin] += landed
        self._tokens_in_bin[rate_bin] += one.tally.prompt_tokens + one.tally.completion_tokens
        self._planned[end] -= moved
        self._leased[end] -= moved if one.leased_at is not None else 0
        if one.leased_at is not None:
            self._lease_s += max(0.0, (one.ended_at - one.leased_at).total_seconds())

    def _place(self, moment: datetime) -> float:
        """Where a moment lies, in bins."""
        return (moment - self._begins_at).total_seconds() / self._bin_s

    def _bin(self, moment: datetime | None) -> int:
        place = 0.0 if moment is None else self._place(moment)
        return min(max(int(place), 0), TIME_BINS - 1)

    def _occupy(self, lane: Lane, begin: datetime, end: datetime, rows: int) -> None:
        """Add rows that were computed from `begin` to `end`: the mean over each bin."""
        first, last = self._place(begin), self._place(end)
        for index in range(self._bin(begin), self._bin(end) + 1):
            overlap = min(last, index + 1) - max(first, index)
            lane.computing[index] += rows * max(0.0, min(1.0, overlap))


def _summed(changes: Sequence[int]) -> list[int]:
    sums, sum_ = [], 0
    for change in changes:
        sum_ += change
        sums.append(sum_)
    return sums
