"""What a training run holds, and how it is begun, saved and taken up again."""

import argparse
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from examples.demo_training.config import Config
from examples.demo_training.data import Data
from examples.demo_training.model import Gpt
from examples.demo_training.teacher import prefix_labels
from examples.demo_training.tokens import Codec, token_ngrams, train_tokenizer
from examples.demo_training.warm_start import related_vectors, warm_up


@dataclass
class Progress:
    """What a run has done so far."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    by_source: dict[str, int] = field(default_factory=dict)


@dataclass
class Run:
    """Everything that one training run holds."""

    config: Config
    data: Data
    labels: list[Tensor]  # the teacher's of each training review, as `prefix_labels` gives them
    codec: Codec
    model: Gpt
    optimizer: torch.optim.AdamW
    progress: Progress
    device: torch.device
    seconds: float
    checkpoint: Path | None


def make_run(args: argparse.Namespace, config: Config, data: Data) -> Run:
    """A fresh run, or the one that the checkpoint directory holds."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(best if args.device == "auto" else args.device)
    path = Path(args.checkpoint_dir) / "checkpoint.pt" if args.checkpoint_dir else None
    saved = load_checkpoint(path, config, device) if path and path.is_file() else None
    started = time.monotonic()
    labels = prefix_labels(data.reviews)
    if saved:
        tokenizer = Tokenizer.from_str(saved["tokenizer"])
    else:
        tokenizer = train_tokenizer(data, config.vocab_size)
    torch.manual_seed(config.seed + (saved["progress"]["step"] if saved else 0))
    codec = Codec.make(tokenizer, config.bpe_dropout)
    model = Gpt(config, token_ngrams(tokenizer))
    progress = Progress()
    if not saved:
        vectors = related_vectors(data, codec, config)
        model.wte.weight = vectors * (0.05 / vectors.std())
        warm_up(model.wte, data, labels, codec, config)
        progress.seconds = time.monotonic() - started
    model.to(device)
    optimizer = make_optimizer(model, config)
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        progress = Progress(**saved["progress"])
        print(f"goes on from step {progress.step} of {path}", flush=True)
    seconds = args.minutes * 60.0
    return Run(config, data, labels, codec, model, optimizer, progress, device, seconds, path)


def make_optimizer(model: Gpt, config: Config) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if weight.dim() != 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.peak_lr, betas=(0.9, 0.98), fused=True)


def load_checkpoint(path: Path, config: Config, device: torch.device) -> dict[str, Any]:
    """What `save_checkpoint` wrote, refused if the run had other settings."""
    saved: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    if saved["config"] != asdict(config):
        raise SystemExit(f"error: {path} is of a run with other settings")
    return saved


def save_checkpoint(run: Run) -> None:
    """Writes the run's state, replacing the last one only when it is whole."""
    if run.checkpoint is None:
        return
    run.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    partial = run.checkpoint.with_suffix(".partial")
    state = {
        "config": asdict(run.config),
        "tokenizer": run.codec.plain.to_str(),
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "progress": asdict(run.progress),
    }
    torch.save(state, partial)
    partial.replace(run.checkpoint)
