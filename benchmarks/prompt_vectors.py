"""Throughput of tuned requests beside plain ones: `python -m benchmarks.prompt_vectors`.

A tuned micro-batch names a vector for each request, which stands in for as many tokens of the
prompt. A plain one has tokens there. The vectors are read from the database when the compute
process lacks them, as a GPU worker does it.
"""

import hashlib
import random
from argparse import Namespace
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from safetensors.numpy import save

from benchmarks.harness import Benchmark, Figures, by_turns, seconds_of
from nightjar.checkpoints import ModelDirectory
from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.compute import messages
from nightjar.gpu_worker.worker.launcher import Launcher
from nightjar.jobs.store import Store
from nightjar.requests import GenerateRequest, SamplingParams

SIZES = {"registered": 1000, "together": 50, "vectors": 16, "prompt": 96, "answer": 32}
REGISTERED, TOGETHER, VECTORS, PROMPT, ANSWER = SIZES.values()


def registered(store: Store, width: int) -> list[str]:
    """Register the vectors; returns their keys."""
    drawn = np.random.default_rng(0)
    keys = []
    for number in range(REGISTERED):
        data = save({"v": drawn.normal(0, 0.05, (VECTORS, width)).astype(np.float32)})
        digest = hashlib.sha256(data).hexdigest()
        keys.append(store.vectors.put(f"task-{number}", data, VECTORS, width, digest).key)
    return keys


def compute(launcher: Launcher, store: Store, prompts: list[list[int]], keys: list[str]) -> None:
    """Compute a micro-batch, with vectors where keys are given."""
    missing = launcher.missing_vectors(keys)
    data = store.vectors.data(missing) if missing else {}
    sampling = SamplingParams(ANSWER, ignore_eos=True)
    named: list[str | None] = [*keys] or [None] * len(prompts)
    asked = [
        messages.Generate(GenerateRequest(launcher.next_ticket(), ids, sampling, key))
        for ids, key in zip(prompts, named, strict=True)
    ]
    flight = launcher.submit(asked, keys, data)
    flight.done.wait()
    if flight.lost is not None:
        raise flight.lost
    if failed := [one for one in flight.answers.values() if isinstance(one, messages.Failed)]:
        raise RuntimeError(failed[0].message)


def measure(args: Namespace, folder: Path) -> Figures:
    """Both kinds of micro-batch in turn, with the demo model on the CPU; the first of each is not
    counted."""
    config = ModelDirectory.open(args.model).config
    drawn, vocab_size = random.Random(0), config.vocab_size
    places = list(range(vocab_size, vocab_size + VECTORS))
    with (
        closing(Store(f"sqlite:///{folder.resolve()}/vectors.db")) as store,
        closing(Launcher(ComputeConfig(args.model, dtype="fp32"), on_failure=print)) as launcher,
    ):
        store.migrate()
        keys = registered(store, config.hidden_size)
        launcher.wait_ready()

        def seconds(start: list[int], together: int) -> float:
            length = PROMPT - len(start)
            texts = [start + drawn.sample(range(100, vocab_size), length) for _ in range(TOGETHER)]
            named = drawn.sample(keys, together)
            return seconds_of(partial(compute, launcher, store, texts, named))

        ways = {"plain": partial(seconds, [], 0), "tuned": partial(seconds, places, TOGETHER)}
        turns = by_turns(ways, args.rounds, warm=1)
    plain, tuned = (median(turns[kind]) for kind in ways)
    tokens = TOGETHER * (PROMPT + ANSWER)
    rates = {"plain_tokens_per_s": tokens / plain, "tuned_tokens_per_s": tokens / tuned}
    return SIZES | {"rounds": args.rounds} | rates | {"tuned_to_plain": plain / tuned}


OPTIONS = {"--rounds": (24, "each has a micro-batch of both kinds")}
BENCHMARK = Benchmark("prompt_vectors", __doc__, measure, options=OPTIONS)

if __name__ == "__main__":
    BENCHMARK.main()
