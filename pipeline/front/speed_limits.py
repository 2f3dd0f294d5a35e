"""The limit of the machine: how fast it could compute the same tokens at best.

Two things bound an engine. Each step reads the weights once, so that the bandwidth of the memory
bounds the steps. Each token takes two operations for each weight, so that arithmetic bounds the
tokens. A short probe measures both with numpy, on all cores.

The probe runs in a process of its own, `python -m nightjar.pipeline.front.speed_limits`, because
`nightjar run` holds little memory itself.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np

from nightjar.checkpoints import ModelDirectory
from nightjar.compute_config import without_cache
from nightjar.jobs.job_report import JobReport, Machine, SpeedLimit

_BYTES_OF = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}
# Read and written by each 8 threads together: more than the cache that 8 cores share holds.
_COPIED_BYTES = 64 << 20
_THREADS_A_CACHE = 8
_PRODUCT_ROWS = 1024
_PROBE_S = 0.15
_PATIENCE_S = 60.0
# Names of the table of input vectors, of which a token reads one row.
_TABLES = {"wte", "embed_tokens", "embed_in", "tok_embeddings", "word_embeddings"}


def probe(threads: int | None = None) -> Machine:
    """Measure the machine for about a third of a second, in a process of its own.

    Raises:
        OSError, subprocess.SubprocessError: The process cannot be started, failed or hangs.
    """
    used = threads or len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "nightjar.pipeline.front.speed_limits", str(used)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PATIENCE_S)
    return Machine(**json.loads(done.stdout))


def measure(threads: int) -> Machine:
    """Measure the machine in this process."""
    size = _COPIED_BYTES // 2 // min(threads, _THREADS_A_CACHE)
    sources = [np.ones(size // 8) for _ in range(threads)]
    targets = [np.zeros(size // 8) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        rounds, seconds = _repeat(lambda: list(pool.map(np.copyto, targets, sources)))
    moved = 2 * size * threads * rounds / seconds
    left = np.ones((_PRODUCT_ROWS, _PRODUCT_ROWS), np.float32)
    products, product_s = _repeat(lambda: left @ left)
    return Machine(moved, 2 * _PRODUCT_ROWS**3 * products / product_s, threads)


def computed_precision(report: JobReport) -> str | None:
    """The precision of most rows; None where the engine or its precision is not known."""
    tally = report.tally
    precision = max(tally.precisions, key=lambda one: tally.precisions[one], default="")
    return precision if _weights_dtype(precision) in _BYTES_OF and tally.engine_s > 0 else None


def speed_limit(report: JobReport, model: ModelDirectory, machine: Machine) -> SpeedLimit | None:
    """The limit for what the job computed; None where `computed_precision` knows none."""
    tally, precision = report.tally, computed_precision(report)
    if precision is None:
        return None
    weights = _weights(model)
    weight_bytes = weights * _BYTES_OF[_weights_dtype(precision)]
    if _weights_dtype(precision) == "fp8":  # whose LM head is in bf16
        weight_bytes += model.config.vocab_size * model.config.hidden_size
    tokens = report.prefilled_tokens + tally.completion_tokens
    memory_s = tally.steps * weight_bytes / machine.copy_bytes_per_s
    arithmetic_s = 2 * weights * tokens / machine.flops_per_s
    share = max(memory_s, arithmetic_s) / tally.engine_s
    return SpeedLimit(
        weights,
        weight_bytes,
        precision,
        tally.engine_s,
        memory_s,
        arithmetic_s,
        share,
        machine,
    )


def _weights_dtype(precision: str) -> str:
    """Return the precision without the dtype of keys and values, which the limit leaves out."""
    return without_cache(precision)[0]


def _weights(model: ModelDirectory) -> int:
    """Weights that are multiplied with each token: all but tables that are only looked up."""
    shapes: Mapping[str, tuple[int, ...]] = {
        name: shape for header in model.headers for name, (_, shape) in header.tensors.items()
    }
    tied = model.config.tied_embeddings
    looked_up = {"wpe", "embed_positions"} | (set() if tied else _TABLES)
    return sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if len(shape) == 2 and not any(part in looked_up for part in name.split("."))
    )


def _repeat(work: Callable[[], object]) -> tuple[int, float]:
    """Do the work for a while after one warm-up; return how often, and the seconds."""
    work()
    started, rounds = time.perf_counter(), 0
    while not rounds or time.perf_counter() - started < _PROBE_S:
        work()
        rounds += 1
    return rounds, time.perf_counter() - started


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure(int(sys.argv[1])))))
