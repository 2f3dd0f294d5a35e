"""Learns prompt vectors: epochs of updates, validation, early stop, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nightjar.gpu_worker.tuning.checkpoint import Progress, load_checkpoint, save_checkpoint
from nightjar.gpu_worker.tuning.frozen_model import FrozenModel
from nightjar.gpu_worker.tuning.losses import batch_loss, measure
from nightjar.gpu_worker.tuning.options import TuneError, TuneOptions
from nightjar.gpu_worker.tuning.prompt_encoder import PromptEncoder, start_vectors
from nightjar.gpu_worker.tuning.rows import Example

_WARM_UP = 0.05
_LONGEST_GRADIENT = 1.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Data:
    """Rows that are learned from, and rows that only measure."""

    train: Sequence[Example]
    valid: Sequence[Example]


class Training:
    """One run on one model; `run` may be called again after a crash and goes on.

    Args:
        model: Stays as it is.
        data: At least one row of each kind.
        options: How to learn.
        folder: Where checkpoints go.
        digest: Of everything that decides the result.
        tell: Called with a line for people after each epoch.
    """

    def __init__(
        self,
        model: FrozenModel,
        data: Data,
        options: TuneOptions,
        folder: Path,
        digest: str,
        tell: Tell,
    ) -> None:
        self._model = model
        self._data = data
        self._options = options
        self._folder = folder
        self._digest = digest
        self._tell = tell
        generator = torch.Generator().manual_seed(options.seed)
        torch.manual_seed(options.seed)  # of the network's first weights
        start = start_vectors(model, options.vectors, generator)
        self._encoder = PromptEncoder(start.cpu(), options.encoder).to(model.device)
        self._optimizer = torch.optim.AdamW(
            self._encoder.parameters(), lr=options.learning_rate, weight_decay=0.0
        )
        self._rows_of_update = options.batch * options.accumulate
        self._updates_of_epoch = -(-len(data.train) // self._rows_of_update)

    def run(self) -> tuple[Tensor, list[dict[str, float]]]:
        """Learn, and return the vectors with the best validation loss, and the history.

        Raises:
            TuneError: The loss is not finite, or the checkpoint belongs to another run.
        """
        found = load_checkpoint(self._folder, self._digest, self._encoder, self._optimizer)
        progress, best = found or (Progress(), self._encoder().detach())
        if found is not None:
            self._tell(f"going on at epoch {progress.epoch + 1}, update {progress.update + 1}")
        while progress.epoch < self._options.epochs and not self._is_over(progress):
            self._epoch(progress, best)
            best = self._validate(progress, best)
            self._save(progress, best)
        return best, progress.history

    def _is_over(self, progress: Progress) -> bool:
        waited = progress.epoch - progress.best_epoch
        return bool(progress.history) and waited >= self._options.patience

    def _epoch(self, progress: Progress, best: Tensor) -> None:
        """Make the updates of an epoch that are left; the order depends on its number alone."""
        generator = torch.Generator().manual_seed(self._options.seed * 1_000_003 + progress.epoch)
        order = torch.randperm(len(self._data.train), generator=generator).tolist()
        while progress.update < self._updates_of_epoch:
            start = progress.update * self._rows_of_update
            rows = [self._data.train[i] for i in order[start : start + self._rows_of_update]]
            self._update(rows, progress)
            progress.update += 1
            if progress.update % self._options.checkpoint_steps == 0:
                self._save(progress, best)

    def _update(self, rows: Sequence[Example], progress: Progress) -> None:
        step = progress.epoch * self._updates_of_epoch + progress.update
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.learning_rate * self._share_of_rate(step)
        self._optimizer.zero_grad()
        weight = _weight(rows)
        for start in range(0, len(rows), self._options.batch):
            some = rows[start : start + self._options.batch]
            loss, counted, _ = batch_loss(self._model, self._encoder(), some)
            torch.autograd.backward(loss / weight)
            progress.summed += float(loss.detach())
            progress.counted += counted
        if not math.isfinite(progress.summed):
            raise TuneError(
                f"the loss is not finite at epoch {progress.epoch + 1}: lower --learning-rate, or "
                "take --dtype fp32"
            )
        torch.nn.utils.clip_grad_norm_(self._encoder.parameters(), _LONGEST_GRADIENT)
        self._optimizer.step()

    def _share_of_rate(self, step: int) -> float:
        """Rise over the first updates, then fall to a tenth at the last epoch's end."""
        total = self._updates_of_epoch * self._options.epochs
        warm = max(1, round(total * _WARM_UP))
        if step < warm:
            return (step + 1) / warm
        return 1.0 - 0.9 * (step - warm) / max(1, total - warm)

    def _validate(self, progress: Progress, best: Tensor) -> Tensor:
        """End the epoch; return the best vectors so far."""
        with torch.no_grad():
            vectors: Tensor = self._encoder().detach().clone()
        found = measure(self._model, vectors, self._data.valid, self._options.batch)
        trained = progress.summed / max(1, progress.counted)
        progress.epoch, progress.update = progress.epoch + 1, 0
        progress.summed, progress.counted = 0.0, 0
        record = {"epoch": progress.epoch, "train_loss": trained, "valid_loss": found.loss}
        if found.accuracy is not None:
            record["valid_accuracy"] = found.accuracy
        progress.history.append(record)
        self._tell(", ".join(f"{name} {value:.4g}" for name, value in record.items()))
        if progress.best_loss is None or found.loss < progress.best_loss:
            progress.best_loss, progress.best_epoch = found.loss, progress.epoch
            return vectors
        return best

    def _save(self, progress: Progress, best: Tensor) -> None:
        state = self._encoder, self._optimizer
        save_checkpoint(self._folder, self._digest, progress, *state, best)


def _weight(rows: Sequence[Example]) -> int:
    """What the summed loss of rows is divided by: learned tokens, or rankings."""
    if rows[0].best is not None:
        return len(rows)
    return sum(one.scored for row in rows for one in row.sequences)
