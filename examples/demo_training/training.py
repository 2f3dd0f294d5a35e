"""How a run's time is spent: the mixture of batches, the steps, the reports."""

import random
import time
from collections.abc import Iterator

from torch import nn

from examples.demo_training.batches import (
    Batch,
    TextBatch,
    batch_tokens,
    chat_groups,
    chat_packs,
    dish_groups,
    review_batches,
)
from examples.demo_training.config import Config
from examples.demo_training.losses import rank_loss, text_loss
from examples.demo_training.run import Run, save_checkpoint
from examples.demo_training.scoring import chat_recall, mean, review_accuracy

# From which share of the time on, how often each kind of batch comes. Ranking chat is learnt soon,
# and it alone makes a model that repeats words of the question; only plain text teaches it to
# write. Reviews profit to the end.
SOURCE_WEIGHTS = [
    (0.00, {"review": 0.40, "chat_text": 0.34, "chat_rank": 0.18, "dish": 0.08}),
    (0.10, {"review": 0.42, "chat_text": 0.20, "chat_rank": 0.31, "dish": 0.07}),
    (0.30, {"review": 0.39, "chat_text": 0.46, "chat_rank": 0.10, "dish": 0.05}),
    (0.48, {"review": 0.30, "chat_text": 0.42, "chat_rank": 0.08, "dish": 0.20}),
    (0.57, {"review": 0.45, "chat_text": 0.43, "chat_rank": 0.08, "dish": 0.04}),
    (0.83, {"review": 0.72, "chat_text": 0.19, "chat_rank": 0.06, "dish": 0.03}),
    (0.96, {"review": 0.32, "chat_text": 0.26, "chat_rank": 0.10, "dish": 0.32}),
]


def source_weights(share: float) -> dict[str, float]:
    """Chances of the kinds of batch after this share of the time."""
    return [weights for start, weights in SOURCE_WEIGHTS if start <= share][-1]


def learning_rate(config: Config, share: float) -> float:
    """Warm-up over 2% of the time, the peak for 80% of it, then straight down to zero."""
    return config.peak_lr * min(1.0, share / 0.02, 5.0 * max(0.0, 1.0 - share)) + 1e-7


def train_step(run: Run, batch: Batch, share: float) -> float:
    """One step of the optimizer; returns the loss."""
    run.model.train()
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.config, share)
    if isinstance(batch, TextBatch):
        loss = text_loss(run.model, batch, run.device)
    else:
        loss = rank_loss(run.model, batch, run.device, 0.4 if share < 0.3 else 0.2)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def train(run: Run, report_every: float, save_every: float = 600.0) -> None:
    """Trains until the run's time is over; reports and saves on the way."""
    seed = run.config.seed + run.progress.step
    sources: dict[str, Iterator[Batch]] = {
        "review": review_batches(run.data, run.codec, run.config, seed),
        "chat_text": chat_packs(run.data, run.codec, run.config, seed),
        "chat_rank": chat_groups(run.data, run.codec, run.config, seed),
        "dish": dish_groups(run.codec, seed),
    }
    rng = random.Random(seed)
    averages: dict[str, float] = {}
    progress = run.progress
    last_report = last_save = progress.seconds
    while progress.seconds < run.seconds:
        started = time.monotonic()
        share = progress.seconds / run.seconds
        weights = source_weights(share)
        name = rng.choices(list(weights), list(weights.values()))[0]
        batch = next(sources[name])
        loss = train_step(run, batch, share)
        averages[name] = 0.95 * averages.get(name, loss) + 0.05 * loss
        progress.step += 1
        progress.tokens += batch_tokens(batch)
        progress.by_source[name] = progress.by_source.get(name, 0) + batch_tokens(batch)
        progress.seconds += time.monotonic() - started
        if progress.seconds - last_report >= report_every:
            last_report = progress.seconds
            report(run, averages)
        if progress.seconds - last_save >= save_every:
            last_save = progress.seconds
            save_checkpoint(run)
    save_checkpoint(run)


def report(run: Run, averages: dict[str, float]) -> None:
    """Prints the running losses and quick figures on a part of the rows kept out."""
    progress = run.progress
    losses = ", ".join(f"{name} {loss:.3f}" for name, loss in sorted(averages.items()))
    judged = review_accuracy(run, run.data.reviews_heldout[:300])
    found = mean(chat_recall(run, run.data.chat_heldout[:100], draws=1))
    print(
        f"{progress.seconds / 60:5.1f} min, step {progress.step},"
        f" {progress.tokens / progress.seconds:,.0f} tokens/s, {losses};"
        f" reviews {judged:.3f}, recall {found:.3f}",
        flush=True,
    )
