"""Throughput of tuned requests beside plain ones: `python -m benchmarks.prompt_vectors`.

1,000 prompt vectors are registered in a database. Each micro-batch has 50 requests. A tuned one
names 50 of the vectors, each of which stands in for as many tokens of the prompt. A plain one has
tokens there. The vectors are read from the database when the compute process lacks them, as a GPU
worker does it. Tuned and plain micro-batches take turns, so that both meet the same machine.
"""

import hashlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save

from benchmarks.machine import describe
from benchmarks.writing import RESULTS, begun, commit, parser, write_json
from nightjar.checkpoints import ModelDirectory
from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.compute import messages
from nightjar.gpu_worker.worker.launcher import Launcher
from nightjar.jobs.store import Store
from nightjar.requests import GenerateRequest, SamplingParams

REGISTERED, TOGETHER, ROUNDS = 1000, 50, 24
VECTORS, PROMPT, ANSWER = 16, 96, 32
MODEL = Path("examples/demo_model")


def registered(store: Store, width: int) -> list[str]:
    """Register the vectors; returns their keys."""
    drawn = np.random.default_rng(0)
    keys = []
    for number in range(REGISTERED):
        data = save({"v": drawn.normal(0, 0.05, (VECTORS, width)).astype(np.float32)})
        digest = hashlib.sha256(data).hexdigest()
        keys.append(store.vectors.put(f"task-{number}", data, VECTORS, width, digest).key)
    return keys


def request(ticket: int, ids: list[int], key: str | None) -> messages.Generate:
    """A request that generates ANSWER tokens."""
    sampling = SamplingParams(ANSWER, ignore_eos=True)
    return messages.Generate(GenerateRequest(ticket, ids, sampling, key))


def seconds(launcher: Launcher, store: Store, prompts: list[list[int]], keys: list[str]) -> float:
    """Compute a micro-batch, with vectors where keys are given; returns how long it took."""
    named: list[str | None] = [*keys] or [None] * len(prompts)
    began = time.perf_counter()
    missing = launcher.missing_vectors(keys)
    data = store.vectors.data(missing) if missing else {}
    asked = [
        request(launcher.next_ticket(), ids, key) for ids, key in zip(prompts, named, strict=True)
    ]
    flight = launcher.submit(asked, keys, data)
    flight.done.wait()
    if flight.lost is not None:
        raise flight.lost
    if failed := [one for one in flight.answers.values() if isinstance(one, messages.Failed)]:
        raise RuntimeError(failed[0].message)
    return time.perf_counter() - began


def measured(launcher: Launcher, store: Store, keys: list[str], vocab_size: int) -> dict[str, Any]:
    """Both kinds of micro-batch in turn; the first of each is not counted."""
    drawn = random.Random(0)
    places = list(range(vocab_size, vocab_size + VECTORS))
    took: dict[str, list[float]] = {"plain": [], "tuned": []}
    run: Callable[..., float] = partial(seconds, launcher, store)
    for _ in range(ROUNDS + 1):
        plain = [drawn.sample(range(100, vocab_size), PROMPT) for _ in range(TOGETHER)]
        other = [
            places + drawn.sample(range(100, vocab_size), PROMPT - VECTORS) for _ in range(TOGETHER)
        ]
        took["plain"].append(run(plain, []))
        took["tuned"].append(run(other, drawn.sample(keys, TOGETHER)))
    tokens = TOGETHER * (PROMPT + ANSWER)
    medians = {kind: statistics.median(times[1:]) for kind, times in took.items()}
    return {
        **{f"{kind}_tokens_per_s": tokens / median for kind, median in medians.items()},
        "tuned_to_plain": medians["plain"] / medians["tuned"],
        "tuned_to_plain_of_pairs": statistics.median(
            plain / tuned for plain, tuned in zip(took["plain"][1:], took["tuned"][1:], strict=True)
        ),
    }


def main() -> None:
    """Measure with the demo model on the CPU, and write the figures."""
    options = parser("benchmarks.prompt_vectors", __doc__).parse_args()
    result = begun("benchmarks.prompt_vectors") | {"commit": commit()}
    model = ModelDirectory.open(MODEL)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"sqlite:///{folder}/vectors.db")
        store.migrate()
        keys = registered(store, model.config.hidden_size)
        launcher = Launcher(ComputeConfig(MODEL, dtype="fp32"), on_failure=print)
        try:
            launcher.wait_ready()
            found = measured(launcher, store, keys, model.config.vocab_size)
        finally:
            launcher.close()
            store.close()
    sizes = {"registered": REGISTERED, "together": TOGETHER, "vectors": VECTORS}
    sizes |= {"prompt": PROMPT, "answer": ANSWER, "rounds": ROUNDS}
    result |= {"machine": describe(torch.get_num_threads()), **sizes, **found}
    write_json(options.out or RESULTS / f"prompt-vectors-{result['date']}.json", result)


if __name__ == "__main__":
    main()
