"""How fast a checkpoint of 1.3 billion weights is converted, beside copying its files.

A Megatron-LM checkpoint of random weights in FP16 is written below --work, and synced. Then copying
its files and converting them are timed by turns, each with a final fsync. The pages of the files
are dropped before, so that the disk is read. Converting is the whole command, from its start to its
end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.harness import DEMO_MODEL, Benchmark, Figures, by_turns, seconds_of
from nightjar.pipeline.front.cli import app

if TYPE_CHECKING:
    import torch

ROUNDS = 3
CONVERT = "import sys; from benchmarks.converting import convert; convert(*sys.argv[1:])"


def write_checkpoint(folder: Path, args: Namespace) -> int:
    """Write the shards; returns their bytes."""
    import torch  # noqa: PLC0415 - the process that converts has none

    ranks, hidden, tokens, total = args.ranks, args.hidden, args.tokens, 0
    part = hidden // ranks

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32).half()

    def same(*shape: int) -> torch.Tensor:  # all ranks hold it whole
        return torch.zeros(shape).half()

    of_a_layer: dict[str, Callable[[], torch.Tensor]] = {
        "input_layernorm.weight": lambda: same(hidden),
        "input_layernorm.bias": lambda: same(hidden),
        "post_attention_layernorm.weight": lambda: same(hidden),
        "post_attention_layernorm.bias": lambda: same(hidden),
        "self_attention.query_key_value.weight": lambda: drawn(3 * part, hidden),
        "self_attention.query_key_value.bias": lambda: drawn(3 * part),
        "self_attention.dense.weight": lambda: drawn(hidden, part),
        "self_attention.dense.bias": lambda: same(hidden),
        "mlp.dense_h_to_4h.weight": lambda: drawn(4 * part, hidden),
        "mlp.dense_h_to_4h.bias": lambda: drawn(4 * part),
        "mlp.dense_4h_to_h.weight": lambda: drawn(hidden, 4 * part),
        "mlp.dense_4h_to_h.bias": lambda: same(hidden),
    }
    arguments = Namespace(
        num_layers=args.layers,
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        max_position_embeddings=2048,
        tensor_model_parallel_size=ranks,
        padded_vocab_size=tokens,
    )
    for rank in range(ranks):
        path = folder / "iter_0000001" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        words = drawn(tokens // ranks, hidden)
        layers = (
            (f"layers.{n}.{k}", v()) for n in range(args.layers) for k, v in of_a_layer.items()
        )
        encoder = OrderedDict(layers)
        encoder |= {f"final_layernorm.{kind}": same(hidden) for kind in ("weight", "bias")}
        embedding = {"word_embeddings": {"weight": words}}
        embedding["position_embeddings"] = {"weight": same(2048, hidden)}
        model = {"language_model": {"embedding": embedding, "encoder": encoder}}
        about = {"args": arguments, "iteration": 1, "checkpoint_version": 3.0}
        torch.save(about | {"model": model}, path)
        total += path.stat().st_size
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    return total


def forget(*files: Path) -> None:
    """Drop the files' pages, so that the next reader reads the disk."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(source: Path, target: Path) -> None:
    """Copy a folder's files by `cp`, and sync them."""
    subprocess.run(["cp", "-r", source, target], check=True)
    for path in target.rglob("*.pt"):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def peak_mib() -> float:
    """The most memory that this process has had resident."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def convert(source: str, target: str) -> None:
    """In a process of its own: run `nightjar convert`, and say what memory it took."""
    before = peak_mib()
    command = ["convert", source, "--tokenizer", str(DEMO_MODEL), "--out", target]
    app(command, standalone_mode=False)
    print(json.dumps({"peak_mib": peak_mib(), "start_mib": before}))


def measure(args: Namespace, folder: Path) -> Figures:
    """Both by turns."""
    source, target = folder / "source", folder / "target"
    size = write_checkpoint(source, args)
    memory: list[dict[str, float]] = []

    def run_convert() -> None:
        command = [sys.executable, "-c", CONVERT, str(source), str(target)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        memory.append(json.loads(done.stdout.splitlines()[-1]))

    def timed(run: Callable[[], None]) -> float:
        forget(*(path for path in source.rglob("*") if path.is_file()))
        seconds = seconds_of(run)
        shutil.rmtree(target)
        return seconds

    ways = {"copy": lambda: timed(lambda: copy(source, target))}
    took = by_turns(ways | {"convert": lambda: timed(run_convert)}, ROUNDS)
    medians = {f"{name}_median_s": round(median(found), 2) for name, found in took.items()}
    return {
        "bytes": size,
        "ranks": args.ranks,
        **{f"{name}_s": found for name, found in took.items()},
        "gib": round(size / 2**30, 2),
        **{name: max(one[name] for one in memory) for name in ("peak_mib", "start_mib")},
        **medians,
        "share_of_copy": round(medians["copy_median_s"] / medians["convert_median_s"], 3),
    }


OPTIONS = {
    "--layers": (24, "of the model"),
    "--hidden": (2048, "its width"),
    "--ranks": (8, "shards"),
    "--tokens": (51_200, "of its vocabulary"),
}
BENCHMARK = Benchmark("converting", __doc__, measure, options=OPTIONS)

if __name__ == "__main__":
    BENCHMARK.main()
