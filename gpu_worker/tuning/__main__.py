"""`nightjar tune` runs this in a process of its own; the command line loads no torch.

It reads its options from standard input and writes its report as one JSON object.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nightjar.checkpoints import CheckpointError, ModelDirectory
from nightjar.gpu_worker.tuning.adapter_files import write_adapter
from nightjar.gpu_worker.tuning.checkpoint import replace_file
from nightjar.gpu_worker.tuning.frozen_model import FrozenModel
from nightjar.gpu_worker.tuning.loss_plot import loss_plot
from nightjar.gpu_worker.tuning.losses import measure
from nightjar.gpu_worker.tuning.options import TuneError, TuneOptions
from nightjar.gpu_worker.tuning.rows import check_classes, read_rows
from nightjar.gpu_worker.tuning.training import Data, Training

EXIT_UNUSABLE = 2
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> int:
    """Tune one model; the exit status is 0 when the vectors are written."""
    given = json.loads(sys.stdin.read())
    try:
        valid = given["valid"]
        report = tune(
            Path(given["model"]),
            Path(given["train"]),
            None if valid is None else Path(valid),
            Path(given["out"]),
            TuneOptions(**given["options"]),
        )
    except (CheckpointError, TuneError, OSError, RuntimeError) as error:
        print(f"nightjar: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_UNUSABLE
    print(json.dumps(report))  # noqa: T201
    return 0


def tune(
    model_path: Path, train: Path, valid: Path | None, out: Path, options: TuneOptions
) -> dict[str, Any]:
    """Learn vectors and write them into `out`; return the report.

    Raises:
        CheckpointError: The model cannot be used.
        TuneError: The rows cannot, or a checkpoint of another run is there.
    """
    directory = ModelDirectory.open(model_path)
    data = _data(directory, train, valid, options)
    out.mkdir(parents=True, exist_ok=True)
    model = FrozenModel(directory, _DTYPES[options.dtype], options.device)
    files = [train] if valid is None else [train, valid]
    digest = options.digest(directory.fingerprint, files)
    vectors, history = Training(model, data, options, out, digest, _tell).run()
    untuned = measure(model, None, data.valid, options.batch)
    tuned = measure(model, vectors, data.valid, options.batch)
    write_adapter(out, vectors, directory, options)
    replace_file(out / "loss.svg", loss_plot(history).encode())
    report = {
        "model": directory.name,
        "vectors": options.vectors,
        "numbers": vectors.numel(),
        "share_of_weights": vectors.numel() / model.parameters,
        "train_rows": len(data.train),
        "valid_rows": len(data.valid),
        "untuned": asdict(untuned),
        "tuned": asdict(tuned),
        "history": history,
        "options": asdict(options),
    }
    replace_file(out / "report.json", json.dumps(report, indent=2).encode() + b"\n")
    return report


def _data(directory: ModelDirectory, train: Path, valid: Path | None, options: TuneOptions) -> Data:
    """Read the rows; without a validation file, hold some of them out."""
    rows = read_rows(train, directory, options.vectors)
    _tell_bad(rows.told, rows.bad)
    examples = rows.examples
    check_classes(examples)
    if valid is not None:
        held = read_rows(valid, directory, options.vectors)
        _tell_bad(held.told, held.bad)
        if (held.examples[0].best is None) != (examples[0].best is None):
            raise TuneError(f"{valid}: targets where {train} has rankings, or the other way round")
        return Data(examples, held.examples)
    count = round(len(examples) * options.valid_share)
    if not 0 < count < len(examples):
        raise TuneError(
            f"{train}: of {len(examples)} rows, {count} would be held out to validate; add rows, "
            "or give a file with --valid"
        )
    generator = torch.Generator().manual_seed(options.seed)
    order = torch.randperm(len(examples), generator=generator).tolist()
    return Data([examples[i] for i in order[count:]], [examples[i] for i in order[:count]])


def _tell(message: str) -> None:
    print(f"nightjar: {message}", file=sys.stderr, flush=True)  # noqa: T201


def _tell_bad(told: list[str], bad: int) -> None:
    for message in told:
        _tell(message)
    if bad:
        _tell(f"{bad} rows cannot be used; the others are")


if __name__ == "__main__":
    sys.exit(main())
