"""How long a model takes to load, beside reading its bytes once, and what a second worker adds.

`python -m benchmarks.loading [--model llama-0.44b] [--dtype fp32] [--out FILE.json]`

The model has random weights. Its folder is below `NIGHTJAR_BENCH_DIR`, or a temporary one. Each
step runs in a process of its own, with the pages of the files dropped before:

- `read`: all bytes of the model's files, once.
- `load`: a process that keeps its own copy of the weights.
- `shared_first`: the same with a folder of shared weights, which it fills.
- `read_packed`: all bytes of the packed file, once.
- `shared_again`: a later process, which maps the packed file and reads all of it.

Then two processes hold the mapped weights, and `smaps` tells what each has for itself.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.converting import forget_file, peak_mib
from benchmarks.machine import describe
from benchmarks.models import save_model
from benchmarks.shapes import SHAPES
from benchmarks.writing import begun, commit, parser, write_json
from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models import Decoder, load_model
from nightjar.gpu_worker.models.shared_weights import load_shared
from nightjar.kernels import stored_weights

ROUNDS = 3
READ_BYTES = 1 << 20
_ONE = "--one"


def read(paths: list[Path]) -> float:
    """Read files once; returns seconds."""
    buffer = memoryview(bytearray(READ_BYTES))
    began = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def touch(decoder: Decoder) -> int:
    """Read every page of the weights; returns their bytes."""
    tensors: list[torch.Tensor] = []
    stored_weights.described((decoder.weights.layers, decoder.weights.head), tensors)
    for tensor in tensors:
        tensor.view(-1).view(torch.uint8)[::4096].sum()
    return sum(tensor.nbytes for tensor in tensors)


def one(step: str, model: Path, folder: Path, dtype: str) -> tuple[dict[str, float], object]:
    """Run one step in this process; returns its figures, and what holds the weights."""
    directory = ModelDirectory.open(model)
    _ = directory.fingerprint  # remembered or hashed: not a part of loading
    files = [header.path for header in directory.headers]
    packed = sorted(folder.glob("*.weights"))
    for path in (*files, *packed):
        forget_file(path)
    if step.startswith("read"):
        return {"seconds": read(packed if step == "read_packed" else files)}, None
    load = partial(load_model, directory)
    before = peak_mib()
    began = time.perf_counter()
    decoder = load(dtype) if step == "load" else load_shared(directory, dtype, folder, load)
    size = touch(decoder)
    seconds = time.perf_counter() - began
    grown = peak_mib() - before
    return {"seconds": seconds, "grown_mib": grown, "weights_mib": size / 2**20}, decoder


def in_a_process(step: str, model: Path, folder: Path, dtype: str) -> dict[str, float]:
    """Run one step in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.loading", _ONE, step, model, folder, dtype]
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def sharing(model: Path, folder: Path, dtype: str) -> dict[str, float]:
    """Hold the mapped weights in two processes; returns MiB that each has of the mapping."""
    command = [sys.executable, "-m", "benchmarks.loading", _ONE, "hold", model, folder, dtype]
    held = []
    try:
        for _ in range(2):
            process = subprocess.Popen(
                list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            held.append(process)
            if process.stdout is None or not process.stdout.readline():
                raise RuntimeError("a process has ended before it held its weights")
        return mapping_mib(held[1].pid, ".weights")
    finally:
        for process in held:
            process.communicate()


def mapping_mib(pid: int, name: str) -> dict[str, float]:
    """What smaps says of the mappings of files with this in their name: MiB by field."""
    text = Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8")
    parts = [part for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text) if name in part]
    found = dict.fromkeys(("Rss", "Pss", "Shared_Clean", "Private_Clean", "Anonymous"), 0.0)
    for field in found:
        found[field] = sum(int(n) for p in parts for n in re.findall(rf"{field}: +(\d+)", p)) / 1024
    return {field.lower(): round(value, 1) for field, value in found.items()}


def main() -> None:
    """Measure, print and write."""
    if sys.argv[1:2] == [_ONE]:
        step, model, folder, dtype = sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5]
        found, held = one("shared" if step == "hold" else step, model, folder, dtype)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        if step == "hold":
            sys.stdin.read()
        del held
        return
    arguments = parser("benchmarks.loading", __doc__)
    arguments.add_argument("--model", choices=SHAPES, default="llama-0.44b")
    arguments.add_argument("--dtype", choices=("fp32", "bf16", "int8"), default="fp32")
    given = arguments.parse_args()
    result: dict[str, Any] = {**begun("benchmarks.loading"), "commit": commit()}
    with tempfile.TemporaryDirectory(dir=os.environ.get("NIGHTJAR_BENCH_DIR")) as name:
        model, folder = save_model(Path(name) / "model", SHAPES[given.model]), Path(name) / "packed"
        steps: dict[str, list[dict[str, float]]] = {}
        for _ in range(ROUNDS):
            for path in folder.glob("*"):
                path.unlink()
            for step in ("read", "load", "shared_first", "read_packed", "shared_again"):
                steps.setdefault(step, []).append(in_a_process(step, model, folder, given.dtype))
        result["second_worker"] = sharing(model, folder, given.dtype)
    seconds = {s: statistics.median(one["seconds"] for one in runs) for s, runs in steps.items()}
    result |= {
        "model": given.model,
        "dtype": given.dtype,
        "seconds": {step: round(value, 3) for step, value in seconds.items()},
        "weights_mib": round(steps["load"][0]["weights_mib"], 1),
        "load_grown_mib": round(max(one["grown_mib"] for one in steps["load"]), 1),
        "load_over_read": round(seconds["load"] / seconds["read"], 2),
        "shared_again_over_read": round(seconds["shared_again"] / seconds["read_packed"], 2),
        "runs": steps,
        "machine": describe(torch.get_num_threads()),
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    if given.out is not None:
        write_json(given.out, result)


if __name__ == "__main__":
    main()
