"""From measured seconds to the figures that are reported: rates, ratios, agreement.

Nothing here measures anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from .peers.protocol import Outcome, Workload


@dataclass
class Measured:
    """One workload of one system: `units` of it took `seconds`, once a round.

    tokens: generated in a round.
    """

    units: int
    of: int
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def rate(self) -> float:
        """Units a second, by the median round."""
        return self.units / median(self.seconds)

    @property
    def token_rate(self) -> float:
        """Generated tokens a second: no system gains by texts that end earlier."""
        return self.tokens / median(self.seconds)


@dataclass
class SystemRecord:
    """What is known of a system in one precision.

    failed: why it could not be measured at all; workload_failures: what single workloads said.
    """

    system: str
    precision: str
    ours: bool
    failed: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Measured] = field(default_factory=dict)
    workload_failures: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    first_token: list[dict[str, float]] = field(default_factory=list)
    peak_mib: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.system} {self.precision}"


def compare(ours: Mapping[str, float], peers: Mapping[str, float]) -> dict[str, Any] | None:
    """Our fastest over the fastest peer, or None where either side has no figure."""
    if not ours or not peers:
        return None
    best, rival = max(ours, key=ours.__getitem__), max(peers, key=peers.__getitem__)
    return {"ratio": round(ours[best] / peers[rival], 3), "ours": best, "peer": rival}


def rates(
    records: Sequence[SystemRecord], workload: str, *, ours: bool, by_token: bool = False
) -> dict[str, float]:
    """Rates of a workload by label; `nightjar run` is reported beside, never compared."""
    measured = {
        record.label: record.measured[workload]
        for record in records
        if record.ours == ours and workload in record.measured and record.system != "nightjar-run"
    }
    if not by_token:
        return {label: one.rate for label, one in measured.items()}
    return {label: one.token_rate for label, one in measured.items() if one.tokens}


def ratios(
    records: Sequence[SystemRecord], workloads: Sequence[str], *, by_token: bool = False
) -> dict[str, Any]:
    """Per workload: our fastest over the fastest peer of any precision, then by precision.

    by_precision compares the same with the same; over_fastest_peer holds each precision of ours
    against the fastest peer of any precision.  by_token: generated tokens a second in place of
    requests, for the workloads that generate.
    """
    overall: dict[str, Any] = {}
    by_precision: dict[str, dict[str, Any]] = {}
    over_fastest: dict[str, dict[str, Any]] = {}
    for workload in workloads:
        ours, peers = (
            rates(records, workload, ours=side, by_token=by_token) for side in (True, False)
        )
        if (found := compare(ours, peers)) is not None:
            overall[workload] = found
        for precision in sorted({record.precision for record in records}):
            mine, theirs = _of(ours, precision), _of(peers, precision)
            if (found := compare(mine, theirs)) is not None:
                by_precision.setdefault(precision, {})[workload] = found
            if (found := compare(mine, peers)) is not None:
                over_fastest.setdefault(precision, {})[workload] = found
    return {
        "overall": overall,
        "by_precision": by_precision,
        "over_fastest_peer": over_fastest,
    }


def _of(by_label: Mapping[str, float], precision: str) -> dict[str, float]:
    return {label: rate for label, rate in by_label.items() if label.endswith(f" {precision}")}


def agreement(reference: Outcome, outcome: Outcome) -> dict[str, Any]:
    """Share of equal texts, and the largest relative difference of a score, where both have one.

    A system that ran the first part of a workload is compared on that part.
    """
    found: dict[str, Any] = {}
    texts = list(zip(reference.generated, outcome.generated, strict=False))
    if texts:
        equal = sum(wanted.text == given.text for wanted, given in texts)
        found["texts_equal"] = round(equal / len(texts), 4)
        found["texts_compared"] = len(texts)
    scores = [
        (wanted, given)
        for row, other in zip(reference.mean_nll, outcome.mean_nll, strict=False)
        for wanted, given in zip(row, other, strict=False)
    ]
    if scores:
        difference = max(abs(given - wanted) / abs(wanted) for wanted, given in scores)
        found["max_relative_score_difference"] = float(f"{difference:.2e}")
        found["scores_compared"] = len(scores)
    return found


def text_figures(workload: Workload, measured: Measured, outcome: Outcome) -> dict[str, Any]:
    """Of a workload that generates: how long the texts are, and how many ended at their stop."""
    pairs = list(zip(workload.generations, outcome.generated, strict=False))
    stops = [text.tokens < asked.max_tokens for asked, text in pairs if asked.stop is not None]
    found: dict[str, Any] = {
        "tokens_a_text": round(measured.tokens / len(pairs), 2),
        "tokens_per_s": round(measured.token_rate, 2),
    }
    if stops:
        found["ended_by_stop"] = round(sum(stops) / len(stops), 4)
    return found


def record_figures(
    record: SystemRecord, reference: SystemRecord | None, workloads: Mapping[str, Workload]
) -> dict[str, Any]:
    """A system's part of the result."""
    figures: dict[str, Any] = {"system": record.system, "precision": record.precision}
    if record.failed is not None:
        return figures | {"failed": record.failed}
    measured = {}
    for name, one in record.measured.items():
        entry: dict[str, Any] = {"units": one.units, "of": one.of, "rate": round(one.rate, 3)}
        entry["seconds"] = [round(seconds, 3) for seconds in one.seconds]
        if record.outcomes[name].generated:
            entry |= text_figures(workloads[name], one, record.outcomes[name])
        if reference is not None and name in reference.outcomes and record is not reference:
            entry |= agreement(reference.outcomes[name], record.outcomes[name])
        measured[name] = entry
    figures |= record.about | {"peak_mib": round(record.peak_mib), "workloads": measured}
    if record.first_token:
        figures["first_token"] = median_first_token(record.first_token)
    if record.workload_failures:
        figures["workload_failures"] = record.workload_failures
    return figures


def first_token(seconds_each: Sequence[float]) -> dict[str, float]:
    """Of prompts in threes (prefix, the same and more, fresh): time to first token, seconds.

    speedup: a fresh prompt's time over that of one whose first 80% were seen before.
    """
    if not seconds_each or len(seconds_each) % 3:
        raise ValueError(f"{len(seconds_each)} times: expected threes")
    repeated, fresh = median(seconds_each[1::3]), median(seconds_each[2::3])
    return {"repeated_s": repeated, "fresh_s": fresh, "speedup": fresh / repeated}


def median_first_token(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each figure's median over the rounds."""
    return {name: round(median(one[name] for one in rounds), 4) for name in rounds[0]}
