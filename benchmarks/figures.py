"""From measured seconds to the figures that are reported: rates, ratios, agreement.

Nothing here measures anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from .harness import Figures
from .peers.protocol import Outcome, Workload


@dataclass
class Measured:
    """One workload of one system: `units` of it took `seconds` and gave `outcomes`, each round."""

    units: int
    of: int
    seconds: list[float] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def outcome(self) -> Outcome:
        """What the last round gave."""
        return self.outcomes[-1]

    @property
    def tokens(self) -> int:
        """Generated in a round."""
        return sum(text.tokens for text in self.outcome.generated)

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
    about: Figures = field(default_factory=dict)
    measured: dict[str, Measured] = field(default_factory=dict)
    workload_failures: dict[str, str] = field(default_factory=dict)
    peak_mib: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.system} {self.precision}"


def ratios(
    records: Sequence[SystemRecord], workloads: Sequence[str], *, by_token: bool = False
) -> Figures:
    """Each precision of ours over the fastest peer, per workload.

    by_precision compares the same with the same; over_fastest_peer holds each precision of ours
    against the fastest peer of any precision.  by_token: generated tokens a second in place of
    requests, for the workloads that generate.
    """
    found: Figures = {"by_precision": {}, "over_fastest_peer": {}}
    for workload in workloads:
        rates: dict[str, float] = {}
        for one in records:
            if (measured := one.measured.get(workload)) and (measured.tokens or not by_token):
                rates[one.label] = measured.token_rate if by_token else measured.rate
        peers = {one.label for one in records if not one.ours and one.label in rates}
        for ours in records:
            if not ours.ours or ours.label not in rates:
                continue
            same = [one.label for one in records if one.precision == ours.precision]
            rivals_of = {"by_precision": peers.intersection(same), "over_fastest_peer": peers}
            for kind, rivals in rivals_of.items():
                if rivals:
                    peer = max(rivals, key=rates.__getitem__)
                    ratio = {"ratio": round(rates[ours.label] / rates[peer], 3)}
                    by_workload = found[kind].setdefault(ours.precision, {})
                    by_workload[workload] = ratio | {"ours": ours.label, "peer": peer}
    return found


def agreement(reference: Outcome, outcome: Outcome) -> Figures:
    """Share of equal texts, and the largest relative difference of a score, where both have one.

    A system that ran the first part of a workload is compared on that part.
    """
    found: Figures = {}
    texts = list(zip(reference.generated, outcome.generated, strict=False))
    if texts:
        equal = sum(wanted.text == given.text for wanted, given in texts)
        found |= {"texts_equal": round(equal / len(texts), 4), "texts_compared": len(texts)}
    differences = [
        abs(given - wanted) / abs(wanted)
        for row, other in zip(reference.mean_nll, outcome.mean_nll, strict=False)
        for wanted, given in zip(row, other, strict=False)
    ]
    if differences:
        found["max_relative_score_difference"] = float(f"{max(differences):.2e}")
        found["scores_compared"] = len(differences)
    return found


def record_figures(
    record: SystemRecord, reference: SystemRecord | None, workloads: Mapping[str, Workload]
) -> Figures:
    """A system's part of the result."""
    figures: Figures = {"system": record.system, "precision": record.precision}
    if record.failed is not None:
        return figures | {"failed": record.failed}
    measured = {}
    for name, one in record.measured.items():
        entry: Figures = {"units": one.units, "of": one.of, "rate": round(one.rate, 3)}
        entry["seconds"] = [round(seconds, 3) for seconds in one.seconds]
        if texts := one.outcome.generated:
            pairs = list(zip(workloads[name].generations, texts, strict=False))
            stops = [text.tokens < asked.max_tokens for asked, text in pairs if asked.stop]
            entry["tokens_a_text"] = round(one.tokens / len(pairs), 2)
            entry["tokens_per_s"] = round(one.token_rate, 2)
            if stops:
                entry["ended_by_stop"] = round(sum(stops) / len(stops), 4)
        if reference is not None and name in reference.measured and record is not reference:
            entry |= agreement(reference.measured[name].outcome, one.outcome)
        measured[name] = entry
    figures |= record.about | {"peak_mib": round(record.peak_mib), "workloads": measured}
    if "first_token" in record.measured:
        figures["first_token"] = first_token(record.measured["first_token"])
    if record.workload_failures:
        figures["workload_failures"] = record.workload_failures
    return figures


def first_token(measured: Measured) -> dict[str, float]:
    """Of prompts in threes (prefix, the same and more, fresh): time to first token, seconds.

    speedup: a fresh prompt's time over that of one whose first 80% were seen before.  Medians of a
    round, and then over the rounds.
    """
    rounds = []
    for outcome in measured.outcomes:
        repeated, fresh = (median(outcome.seconds_each[place::3]) for place in (1, 2))
        rounds.append((repeated, fresh, fresh / repeated))
    medians = (round(median(column), 4) for column in zip(*rounds, strict=True))
    return dict(zip(("repeated_s", "fresh_s", "speedup"), medians, strict=True))
