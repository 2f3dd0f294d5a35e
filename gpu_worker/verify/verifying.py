"""Runs all checks of a model, on the CPU, layer by layer where memory matters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models import load_model
from nightjar.gpu_worker.verify.agreement import agreement, answers
from nightjar.gpu_worker.verify.couplings import Coupling, couplings, smoothness
from nightjar.gpu_worker.verify.losses import measure_losses
from nightjar.gpu_worker.verify.peaks import WatchedDecoder
from nightjar.gpu_worker.verify.planning import plan_of
from nightjar.gpu_worker.verify.raw_layers import RawLayers
from nightjar.gpu_worker.verify.report import (
    Report,
    describe_plan,
    judge_agreements,
    judge_couplings,
    judge_logits,
    judge_losses,
    judge_peaks,
    judge_positions,
)
from nightjar.gpu_worker.verify.source_logits import SourceLogits, compare_logits


def verify(
    directory: ModelDirectory,
    texts: Sequence[str],
    precisions: Sequence[str],
    tell: Callable[[str], None] = lambda _: None,
    source: SourceLogits | None = None,
) -> Report:
    """Check a model.

    directory: its shapes have been checked when it was opened.
    texts: the sample.  precisions: those that are compared with fp32.
    tell: called with what is being done.  source: the source framework's logits.

    Raises:
        CheckpointError: A file changed meanwhile.
        ValueError: The sample is empty, or a precision is unknown.
    """
    tell("statistics of weights")
    found, positions = _weights(directory)
    tell("loss on text")
    exact = load_model(directory, "fp32")
    losses = measure_losses(directory, exact, texts)
    compared = None
    if source is not None:
        tell("logits of the source")
        compared = compare_logits(exact, source)
    tell("largest outputs")
    watched = WatchedDecoder(exact)
    expected = answers(directory, watched, texts)
    del exact
    peaks = watched.peaks()
    plan = plan_of(peaks, directory.plain_fingerprint)
    agreements = []
    for precision in precisions:
        tell(f"answers in {precision}")
        given = answers(directory, load_model(directory, precision, plan=plan), texts)
        agreements.append(agreement(plan.precision(precision), expected, given))
    findings = (
        *([] if compared is None else [judge_logits(compared)]),
        *judge_losses(losses),
        *judge_couplings(found),
        *judge_positions(positions),
        *judge_peaks(peaks),
        describe_plan(plan),
        *judge_agreements(agreements),
    )
    return Report(
        model=str(directory.path),
        fingerprint=directory.fingerprint,
        findings=findings,
        losses=losses,
        couplings=tuple(found),
        peaks=tuple(peaks),
        agreements=tuple(agreements),
        plan=plan,
        logits=compared,
    )


def _weights(directory: ModelDirectory) -> tuple[list[Coupling], float | None]:
    """Return the couplings of all layers, and how alike neighbouring positions are."""
    generator = torch.Generator().manual_seed(0)
    layers = RawLayers(directory)
    found: list[Coupling] = []
    with torch.inference_mode():
        for number, layer in enumerate(layers):
            found += couplings(layer, number, directory.config.head_size, generator)
        table = layers.positions
        return found, None if table is None else smoothness(table)
