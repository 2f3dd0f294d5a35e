"""How fast a checkpoint of 1.3 billion weights is converted, beside copying its files.

`python -m benchmarks.converting [--layers 24] [--hidden 2048] [--ranks 8] [--out FILE.json]`

A Megatron-LM checkpoint of random weights in FP16 is written into a temporary folder, and synced.
Then copying its files and converting them are timed by turns, each with a final fsync. The pages of
the files are dropped before, so that the disk is read. Converting is the whole command, from its
start to its end.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import describe
from benchmarks.writing import begun, commit, parser, write_json
from nightjar.pipeline.front.cli import app

if TYPE_CHECKING:
    import torch

TOKENIZER = Path(__file__).resolve().parents[1] / "examples" / "demo_model"
ROUNDS = 3
_ONE = "--one"


def write_checkpoint(folder: Path, layers: int, hidden: int, ranks: int, tokens: int) -> int:
    """Write the shards; returns their bytes."""
    import torch  # noqa: PLC0415 - the process that converts has none

    total = 0
    for rank in range(ranks):
        path = folder / "iter_0000001" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        names = dict(_tensors(layers, hidden, ranks, tokens))
        value = {
            "args": Namespace(
                num_layers=layers,
                hidden_size=hidden,
                num_attention_heads=hidden // 64,
                max_position_embeddings=2048,
                tensor_model_parallel_size=ranks,
                padded_vocab_size=tokens,
            ),
            "iteration": 1,
            "checkpoint_version": 3.0,
            "model": {
                "language_model": {
                    "embedding": {
                        "word_embeddings": {"weight": _random(tokens // ranks, hidden)},
                        "position_embeddings": {"weight": torch.zeros(2048, hidden).half()},
                    },
                    "encoder": OrderedDict(
                        (name, torch.zeros(shape).half() if same else _random(*shape))
                        for name, (shape, same) in names.items()
                    ),
                }
            },
        }
        torch.save(value, path)
        total += path.stat().st_size
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    return total


def _tensors(
    layers: int, hidden: int, ranks: int, _tokens: int
) -> Iterator[tuple[str, tuple[tuple[int, ...], bool]]]:
    """Yield name, shape, and whether all ranks hold it whole."""
    part = hidden // ranks
    for layer in range(layers):
        root = f"layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            for kind in ("weight", "bias"):
                yield f"{root}{norm}.{kind}", ((hidden,), True)
        yield f"{root}self_attention.query_key_value.weight", ((3 * part, hidden), False)
        yield f"{root}self_attention.query_key_value.bias", ((3 * part,), False)
        yield f"{root}self_attention.dense.weight", ((hidden, part), False)
        yield f"{root}self_attention.dense.bias", ((hidden,), True)
        yield f"{root}mlp.dense_h_to_4h.weight", ((4 * part, hidden), False)
        yield f"{root}mlp.dense_h_to_4h.bias", ((4 * part,), False)
        yield f"{root}mlp.dense_4h_to_h.weight", ((hidden, 4 * part), False)
        yield f"{root}mlp.dense_4h_to_h.bias", ((hidden,), True)
    for kind in ("weight", "bias"):
        yield f"final_layernorm.{kind}", ((hidden,), True)


def _random(*shape: int) -> torch.Tensor:
    import torch  # noqa: PLC0415

    return torch.randn(shape, dtype=torch.float32).half()


def forget(folder: Path) -> None:
    """Drop the files' pages, so that the next reader reads the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            forget_file(path)


def forget_file(path: Path) -> None:
    """Drop one file's pages."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(source: Path, target: Path) -> float:
    """Copy a folder's files by `cp`, and sync them; returns seconds."""
    began = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    for path in target.rglob("*.pt"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - began


def converted(source: Path, target: Path) -> dict[str, float]:
    """Run `nightjar convert`; returns its seconds and peak MiB."""
    command = [sys.executable, "-m", "benchmarks.converting", _ONE, str(source), str(target)]
    began = time.perf_counter()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, **json.loads(done.stdout.splitlines()[-1])}


def peak_mib() -> float:
    """The most memory that this process has had resident."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def _one(source: Path, target: Path) -> None:
    before = peak_mib()
    options = ["--tokenizer", str(TOKENIZER), "--out", str(target)]
    app(["convert", str(source), *options], standalone_mode=False)
    sys.stdout.write(json.dumps({"peak_mib": peak_mib(), "before_mib": before}))


def main() -> None:
    """Measure, print and write."""
    if sys.argv[1:2] == [_ONE]:
        _one(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    arguments = parser("benchmarks.converting", __doc__)
    arguments.add_argument("--layers", type=int, default=24)
    arguments.add_argument("--hidden", type=int, default=2048)
    arguments.add_argument("--ranks", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=51_200)
    given = arguments.parse_args()
    found: dict[str, Any] = {**begun("benchmarks.converting"), "commit": commit()}
    with tempfile.TemporaryDirectory(dir=os.environ.get("NIGHTJAR_BENCH_DIR")) as name:
        folder = Path(name)
        source = folder / "source"
        size = write_checkpoint(source, given.layers, given.hidden, given.ranks, given.tokens)
        copies, conversions = [], []
        for number in range(ROUNDS):
            forget(source)
            copies.append(copy(source, folder / f"copy{number}"))
            shutil.rmtree(folder / f"copy{number}")
            forget(source)
            conversions.append(converted(source, folder / f"model{number}"))
            shutil.rmtree(folder / f"model{number}")
    found |= {
        "bytes": size,
        "ranks": given.ranks,
        "copy_s": copies,
        "convert_s": [one["seconds"] for one in conversions],
        "gib": round(size / 2**30, 2),
        "peak_mib": max(one["peak_mib"] for one in conversions),
        "start_mib": max(one["before_mib"] for one in conversions),
        "machine": describe(1, with_torch=False),
    }
    found["copy_median_s"] = round(statistics.median(copies), 2)
    found["convert_median_s"] = round(statistics.median(found["convert_s"]), 2)
    found["share_of_copy"] = round(found["copy_median_s"] / found["convert_median_s"], 3)
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    if given.out is not None:
        write_json(given.out, found)


if __name__ == "__main__":
    main()
