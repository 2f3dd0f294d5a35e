"""What a training run is told."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Encoder = Literal["none", "mlp"]
TrainingDtype = Literal["fp32", "bf16"]


class TuneError(Exception):
    """The rows, the options or a checkpoint cannot be used; the message says how to mend it."""


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """One run.

    vectors: How many are learned. encoder: "mlp" learns them through the network of P-tuning.
    batch: Rows of one pass; accumulate: passes of one update. learning_rate: At its highest.
    valid_share: Part of the rows that are held out where no validation file is given.
    patience: Epochs without a better validation loss after which the run ends.
    checkpoint_steps: Updates between two checkpoints.
    """

    vectors: int = 16
    encoder: Encoder = "none"
    epochs: int = 10
    batch: int = 16
    accumulate: int = 1
    learning_rate: float = 0.01
    valid_share: float = 0.1
    patience: int = 3
    seed: int = 0
    dtype: TrainingDtype = "fp32"
    device: str = "cpu"
    checkpoint_steps: int = 200

    def digest(self, fingerprint: str, files: list[Path]) -> str:
        """Return what a checkpoint must agree with: options, model and bytes of the rows."""
        found = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        found.update(fingerprint.encode())
        for path in files:
            found.update(hashlib.sha256(path.read_bytes()).digest())
        return found.hexdigest()
