"""How a run's time is spent: the mixture of batches, the steps, the reports."""

import random
import time
from collections.abc import Iterator

from torch import nn
from torch.nn.utils import parametrize

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

# How often each kind of batch comes, from the first step to the last.
SOURCE_WEIGHTS = {"review": 0.50, "chat_text": 0.30, "chat_rank": 0.13, "dish": 0.07}


def learning_rate(config: Config, share: float) -> float:
    """Warm-up over 2% of the time, then straight down to zero."""
    return config.peak_lr * min(1.0, share / 0.02, max(0.0, 1.0 - share) / 0.98) + 1e-7


def train_step(run: Run, batch: Batch, share: float) -> float:
    """One step of the optimizer; returns the loss."""
    run.model.train()
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.config, share)
    with parametrize.cached():  # the sum over n-grams is worked out once
        if isinstance(batch, TextBatch):
            loss = text_loss(run.model, batch, run.device)
        else:
            loss = rank_loss(run.model, batch, run.device)
        loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def train(run: Run, report_every: float, save_every: float = 600.0) -> None:
    """Trains until the run's time is over; reports and saves on the way."""
    seed = run.config.seed + run.progress.step
    sources: dict[str, Iterator[Batch]] = {
        "review": review_batches(run.data, run.labels, run.codec, run.config, seed),
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
        name = rng.choices(list(SOURCE_WEIGHTS), list(SOURCE_WEIGHTS.values()))[0]
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
    """Prints the running losses and quick figures on the validation rows."""
    progress = run.progress
    losses = ", ".join(f"{name} {loss:.3f}" for name, loss in sorted(averages.items()))
    judged = review_accuracy(run, run.data.reviews_valid)
    found = mean(chat_recall(run, run.data.chat_valid, draws=1))
    print(
        f"{progress.seconds / 60:5.1f} min, step {progress.step},"
        f" {progress.tokens / progress.seconds:,.0f} tokens/s, {losses};"
        f" reviews {judged:.3f}, recall {found:.3f}",
        flush=True,
    )
