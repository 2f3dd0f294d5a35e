"""The page of a model's verification: its findings, and the figures behind them."""

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from nightjar.jobs.records import JsonObject
from nightjar.jobs.report.charts import columns
from nightjar.jobs.report.shell import render_page, write_page

_FP16_MAX = 65_504.0


def write_model_page(path: Path, found: JsonObject) -> None:
    """Write the page; who reads `path` meanwhile sees the old or the new whole.

    found: what the verification gives as JSON.

    Raises:
        OSError: The file cannot be written.
    """
    write_page(path, render_model_page(found))


def render_model_page(found: JsonObject) -> str:
    """Return the page."""
    findings = found["findings"]
    return render_page(
        "model.html.j2",
        found=found,
        findings=findings,
        counts={
            verdict: sum(one["verdict"] == verdict for one in findings)
            for verdict in ("ok", "warning", "failure")
        },
        losses=_losses(found["losses"]),
        without=_without(found["losses"]),
        couplings=_couplings(found["couplings"]),
        peaks=_peaks(found["peaks"]),
        peak_chart=_peak_chart(found["peaks"]),
        made_at=datetime.now(UTC),
    )


def _losses(losses: JsonObject) -> list[tuple[str, float]]:
    return [
        ("the model", losses["model"]),
        ("the model, with the tokens in a random order", losses["shuffled"]),
        ("counting tokens in the other texts", losses["unigram"]),
    ]


def _without(losses: JsonObject) -> Markup:
    """What each layer contributes: the loss without it, less the model's."""
    gains = [_finite(loss - losses["model"]) for loss in losses["without"]]
    labels = [f"layer {n}" for n in range(len(gains))]
    return columns(gains, labels, "What the loss would grow by without each layer")


def _couplings(couplings: list[JsonObject]) -> list[dict[str, Any]]:
    """For each pair of matrices: the least statistic, and the layer that has it."""
    pairs: dict[str, list[JsonObject]] = {}
    for one in couplings:
        pairs.setdefault(one["pair"], []).append(one)
    return [
        {
            "pair": pair,
            "blocks": len(of_pair[0]["z"]),
            "least": min(min(one["z"]) for one in of_pair),
            "layer": min(of_pair, key=lambda one: min(one["z"]))["layer"],
        }
        for pair, of_pair in pairs.items()
    ]


def _peaks(peaks: list[JsonObject]) -> list[JsonObject]:
    """The largest outputs, most first."""
    return sorted(peaks, key=lambda peak: -_finite(peak["largest"]))[:12]


def _peak_chart(peaks: list[JsonObject]) -> Markup:
    """The largest output of each layer, as powers of ten."""
    layers: dict[int, float] = {}
    for peak in peaks:
        layers[peak["layer"]] = max(layers.get(peak["layer"], 0.0), _finite(peak["largest"]))
    names = [f"layer {layer}: {largest:.4g}" for layer, largest in sorted(layers.items())]
    powers = [math.log10(max(1.0, largest)) for _, largest in sorted(layers.items())]
    limit = math.log10(_FP16_MAX)
    return columns(powers, names, "Powers of ten of the largest output of each layer", limit)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 1e30
