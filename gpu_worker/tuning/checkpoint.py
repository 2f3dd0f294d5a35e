"""The state of a run on disk, from which it goes on to the last bit."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from nightjar.gpu_worker.tuning.options import TuneError
from nightjar.gpu_worker.tuning.prompt_encoder import PromptEncoder

NAME = "checkpoint.safetensors"
_STATE = "state"


@dataclass(slots=True)
class Progress:
    """Where a run is.

    epoch, update: of the next update. history: one record an epoch. best_loss: on the validation
    rows. summed, counted: training loss of this epoch so far.
    """

    epoch: int = 0
    update: int = 0
    best_loss: float | None = None
    best_epoch: int = 0
    summed: float = 0.0
    counted: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


def save_checkpoint(
    folder: Path,
    digest: str,
    progress: Progress,
    encoder: PromptEncoder,
    optimizer: torch.optim.Optimizer,
    best: Tensor,
) -> None:
    """Write the state in place of the last one; a killed process leaves one or the other."""
    tensors = {f"learned.{name}": one.detach() for name, one in encoder.named_parameters()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": one for name, one in state.items()}
    tensors["best"] = best
    kept = {name: one.cpu().contiguous() for name, one in tensors.items()}
    metadata = {_STATE: json.dumps({"digest": digest, **asdict(progress)})}
    replace_file(folder / NAME, save(kept, metadata))


def load_checkpoint(
    folder: Path,
    digest: str,
    encoder: PromptEncoder,
    optimizer: torch.optim.Optimizer,
) -> tuple[Progress, Tensor] | None:
    """Continue from the last state: set what is learned, return the progress and best vectors.

    Raises:
        TuneError: The state is damaged, or of a run with other options, rows or model.
    """
    path = folder / NAME
    if not path.exists():
        return None
    data = path.read_bytes()
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        state = json.loads(header["__metadata__"][_STATE])
    except (SafetensorError, ValueError, KeyError) as error:
        raise TuneError(f"{path}: damaged: {error}; delete it to begin again") from error
    if state.pop("digest") != digest:
        raise TuneError(
            f"{path}: begun with other options, rows or another model; use the same ones, another "
            "--out, or --overwrite to begin again"
        )
    with torch.no_grad():
        for name, one in encoder.named_parameters():
            one.copy_(tensors[f"learned.{name}"])
    known = optimizer.state_dict()
    numbers = {name.split(".")[1] for name in tensors if name.startswith("optimizer.")}
    known["state"] = {
        int(number): {
            name: tensors[f"optimizer.{number}.{name}"]
            for name in ("step", "exp_avg", "exp_avg_sq")
        }
        for number in numbers
    }
    optimizer.load_state_dict(known)
    return Progress(**state), tensors["best"]


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole: a reader sees the old one or the new one."""
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
