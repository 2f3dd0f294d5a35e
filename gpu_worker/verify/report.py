"""What a verification found: each check with its verdict, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from nightjar.checkpoints.precision_plan import PrecisionPlan
from nightjar.checkpoints.verdicts import Verdict
from nightjar.gpu_worker.verify.agreement import Agreement
from nightjar.gpu_worker.verify.couplings import Coupling
from nightjar.gpu_worker.verify.losses import Losses
from nightjar.gpu_worker.verify.peaks import FP16_MAX, KEPT_IN_FP32, Peak
from nightjar.gpu_worker.verify.source_logits import (
    MOST_DIFFERENCE,
    NOTABLE_DIFFERENCE,
    LogitsComparison,
)

Grade = Literal["ok", "warning", "failure"]
LEAST_SMOOTHNESS = 0.02
_NAMED = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: its name, its verdict, and one sentence about what was found."""

    check: str
    verdict: Grade
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """All findings about a model, and the figures behind them."""

    model: str
    fingerprint: str
    findings: tuple[Finding, ...]
    losses: Losses
    couplings: tuple[Coupling, ...]
    peaks: tuple[Peak, ...]
    agreements: tuple[Agreement, ...]
    plan: PrecisionPlan
    logits: LogitsComparison | None = None

    @property
    def is_sound(self) -> bool:
        """Whether no check failed."""
        return all(finding.verdict != "failure" for finding in self.findings)

    @property
    def verdict(self) -> Verdict:
        """The outcome, as a start remembers it."""
        return verdict_of(self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return all figures for programs."""
        more = {"is_sound": self.is_sound, "lines": self.lines(), "plan": self.plan.as_json()}
        return {**asdict(self), **more}

    def lines(self) -> list[str]:
        """Return the report for people."""
        marks = {"ok": "ok     ", "warning": "WARNING", "failure": "FAILURE"}
        made = [f"{marks[one.verdict]}  {one.check}: {one.text}" for one in self.findings]
        word = "sound" if self.is_sound else "not in order; do not serve it"
        return [*made, f"{self.model} is {word}"]


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """Return the outcome of these checks."""
    failed = [f"{one.check}: {one.text}" for one in findings if one.verdict == "failure"]
    return Verdict(not failed, "; ".join(failed))


def judge_losses(losses: Losses) -> list[Finding]:
    """Judge what the model makes of plain text."""
    figures = (
        f"loss {losses.model:.2f} a token over {losses.tokens} tokens, {losses.shuffled:.2f} with "
        f"the tokens in a random order, {losses.unigram:.2f} by counting tokens"
    )
    # A NaN or an infinity is no better than anything.
    better = losses.model < min(losses.unigram, losses.shuffled)
    found = [Finding("loss", "ok" if better else "failure", figures)]
    if losses.harmful:
        layers = _listed(losses.harmful)
        text = f"on this text the model is better without layer {layers}; try a longer text"
        found.append(Finding("layers", "warning", text))
    elif losses.without:
        found.append(Finding("layers", "ok", "every layer makes the loss smaller"))
    return found


def judge_couplings(couplings: Sequence[Coupling]) -> list[Finding]:
    """Judge the order of heads, channels and neurons; a swap loosens two blocks at least."""
    found = []
    for pair in dict.fromkeys(coupling.pair for coupling in couplings):
        of_pair = [coupling for coupling in couplings if coupling.pair == pair]
        swapped = [c for c in of_pair if len(c.loose) >= min(2, len(c.z))]
        single = [c for c in of_pair if c.loose and c not in swapped]
        if swapped:
            places = "; ".join(
                f"layer {c.layer}, {_blocks(pair)} {_listed(c.loose)}" for c in swapped[:_NAMED]
            )
            text = f"the order of rows may be wrong in {places}"
            found.append(Finding(pair, "failure", text))
        elif single:
            places = "; ".join(f"layer {c.layer}, {_listed(c.loose)}" for c in single[:_NAMED])
            text = f"one of the {_blocks(pair)} fits no better than chance in {places}"
            found.append(Finding(pair, "warning", text))
        else:
            least = min(min(c.z) for c in of_pair)
            text = f"every one of the {_blocks(pair)} is in order (z of {least:.1f} or more)"
            found.append(Finding(pair, "ok", text))
    return found


def judge_positions(smoothness: float | None) -> list[Finding]:
    """Judge learned positions: neighbours are alike."""
    if smoothness is None:
        return []
    verdict: Grade = "ok" if smoothness >= LEAST_SMOOTHNESS else "failure"
    return [Finding("positions", verdict, f"neighbours are alike by {smoothness:.2f}")]


def judge_peaks(peaks: Sequence[Peak]) -> list[Finding]:
    """Say which numbers FP16 cannot hold."""
    largest = max(
        (peak for peak in peaks if peak.product not in KEPT_IN_FP32), key=lambda p: p.largest
    )
    too_large = [peak for peak in peaks if peak.overflows]
    if not too_large:
        text = f"the largest output is {largest.largest:.0f} ({largest.product}, layer "
        return [Finding("fp16", "ok", f"{text}{largest.layer}); FP16 ends at {FP16_MAX:.0f}")]
    places = ", ".join(f"{p.product} of layer {p.layer}" for p in too_large[:_NAMED])
    more = f" and {len(too_large) - _NAMED} more" if len(too_large) > _NAMED else ""
    advice = "serve it in bf16 or fp32, or in fp16 with a plan: --write-plan"
    if any(peak.product == "last" for peak in too_large):
        advice = "no plan can help the last norm: serve it in bf16 or fp32"
    return [Finding("fp16", "warning", f"{places}{more} pass {FP16_MAX:.0f}: {advice}")]


def judge_logits(found: LogitsComparison) -> Finding:
    """Judge the logits against those of the source framework."""
    figures = (
        f"they differ by {found.difference:.2g} of their spread at most; the best token is the "
        f"same at {found.greedy:.0%} of {found.positions} positions"
    )
    if found.difference <= MOST_DIFFERENCE:
        small = found.difference <= NOTABLE_DIFFERENCE
        return Finding("logits", "ok" if small else "warning", figures)
    if found.stage is not None:
        cause = f"the first hidden states that differ are those of {found.stage}"
    elif found.position:  # one token alone attends only to itself
        cause = "the first token agrees: look at queries, keys and positions"
    else:
        cause = "the first token differs: look at embeddings, values, feed-forward blocks and norms"
    return Finding(
        "logits",
        "failure",
        f"they differ from the source's from text {found.text}, token {found.position} on; "
        f"{cause} ({figures})",
    )


def describe_plan(plan: PrecisionPlan) -> Finding:
    """Say what a precision plan keeps in FP32."""
    if not plan.concerns("fp16") and not plan.concerns("int8"):
        return Finding("plan", "ok", "none is needed: FP16 holds every product eight times over")
    parts = [
        f"layer {number} ({', '.join(name for name, value in asdict(layer).items() if value)})"
        for number, layer in sorted(plan.fp16.items())
    ]
    parts += [f"layer {number} in int8" for number in plan.int8]
    more = f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
    return Finding("plan", "ok", f"{plan.name} protects {'; '.join(parts[:_NAMED])}{more}")


def judge_agreements(agreements: Sequence[Agreement]) -> list[Finding]:
    """Say how often each precision gives what fp32 gives."""
    return [
        Finding(
            one.precision,
            "warning" if one.not_finite or one.first_tokens < 0.8 else "ok",
            f"{one.first_tokens:.0%} of first tokens and {one.texts:.0%} of texts as fp32, scores "
            f"within {one.score_distance:.4f}"
            + (f", {one.not_finite} requests overflow" if one.not_finite else ""),
        )
        for one in agreements
    ]


def _blocks(pair: str) -> str:
    if pair in ("query-key", "value-output"):
        return "heads"
    return "blocks of neurons" if pair in ("up-down", "gate-down") else "channels"


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_NAMED]))
    return shown + (" ..." if len(numbers) > _NAMED else "")
