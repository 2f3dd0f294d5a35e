"""How long a model takes to load, beside reading its bytes once, and what a second worker adds.

The model has random weights, in a folder below --work. Each step runs in a process of its own, with
the pages of the files dropped before:

- `read`: all bytes of the model's files, once.
- `load`: a process that keeps its own copy of the weights.
- `shared_first`: the same with a folder of shared weights, which it fills.
- `read_packed`: all bytes of the packed file, once.
- `shared_again`: a later process, which maps the packed file and reads all of it.

Then two processes hold the mapped weights, and `smaps` tells what each has for itself.
"""

import os
from argparse import Namespace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import psutil
import torch

from benchmarks.converting import forget, peak_mib
from benchmarks.harness import Benchmark, Figures, by_turns, seconds_of
from benchmarks.models import save_model
from benchmarks.weights import SHAPES
from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models import Decoder, load_model
from nightjar.gpu_worker.models.shared_weights import load_shared
from nightjar.kernels import stored_weights

ROUNDS = 3
READ_BYTES = 1 << 20
STEPS = ("read", "load", "shared_first", "read_packed", "shared_again")
_held: list[Decoder] = []
"""In a step's process: what has the weights."""


def read(paths: list[Path]) -> None:
    """Read files once."""
    buffer = memoryview(bytearray(READ_BYTES))
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def touch(decoder: Decoder) -> int:
    """Read every page of the weights; returns their bytes."""
    tensors: list[torch.Tensor] = []
    stored_weights.described((decoder.weights.layers, decoder.weights.head), tensors)
    for tensor in tensors:
        tensor.view(-1).view(torch.uint8)[::4096].sum()
    return sum(tensor.nbytes for tensor in tensors)


def run_step(step: str, model: Path, folder: Path, dtype: str) -> dict[str, float]:
    """In a process of its own: run one step; the process keeps the weights."""
    directory = ModelDirectory.open(model)
    _ = directory.fingerprint  # remembered or hashed: not a part of loading
    files = [header.path for header in directory.headers]
    packed = sorted(folder.glob("*.weights"))
    if step == "shared_first":
        while packed:
            packed.pop().unlink()
    forget(*files, *packed)
    if step.startswith("read"):
        return {"seconds": seconds_of(lambda: read(packed if step == "read_packed" else files))}
    load, sizes, before = partial(load_model, directory), list[int](), peak_mib()

    def run() -> None:
        _held.append(load(dtype) if step == "load" else load_shared(directory, dtype, folder, load))
        sizes.append(touch(_held[0]))

    seconds = seconds_of(run)
    grown = peak_mib() - before
    return {"seconds": seconds, "grown_mib": grown, "weights_mib": sizes[0] / 2**20}


def alone(step: str, *given: object) -> dict[str, float]:
    """A step in a process that ends with it."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(run_step, (step, *given))


def sharing(*given: object) -> dict[str, float]:
    """Hold the mapped weights in two processes; returns MiB that the second has of the mapping."""
    context = get_context("spawn")
    with context.Pool(1) as first, context.Pool(1) as second:
        for pool in (first, second):
            pool.apply(run_step, ("shared_again", *given))
        mappings = psutil.Process(second.apply(os.getpid)).memory_maps()
    packed = [one for one in mappings if ".weights" in one.path]
    fields = ("rss", "pss", "shared_clean", "private_clean", "anonymous")
    return {name: round(sum(getattr(m, name) for m in packed) / 2**20, 1) for name in fields}


def measure(args: Namespace, folder: Path) -> Figures:
    """Every step in every round, then two processes side by side."""
    model = save_model(folder / "model", SHAPES[args.model])
    given = (model, folder / "packed", args.dtype)
    steps = by_turns({step: partial(alone, step, *given) for step in STEPS}, ROUNDS)
    seconds = {step: median(one["seconds"] for one in runs) for step, runs in steps.items()}
    return {
        "second_worker": sharing(*given),
        "model": args.model,
        "dtype": args.dtype,
        "seconds": {step: round(value, 3) for step, value in seconds.items()},
        "weights_mib": round(steps["load"][0]["weights_mib"], 1),
        "load_grown_mib": round(max(one["grown_mib"] for one in steps["load"]), 1),
        "load_over_read": round(seconds["load"] / seconds["read"], 2),
        "shared_again_over_read": round(seconds["shared_again"] / seconds["read_packed"], 2),
        "runs": steps,
    }


OPTIONS = {
    "--model": ("llama-0.44b", "its shape; the weights are random", SHAPES),
    "--dtype": ("fp32", "its precision", ("fp32", "bf16", "int8")),
}
BENCHMARK = Benchmark("loading", __doc__, measure, options=OPTIONS)

if __name__ == "__main__":
    BENCHMARK.main()
