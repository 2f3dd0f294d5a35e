"""Throughput with LoRA adapters beside the base model's: `python -m benchmarks.lora`.

The requests of a micro-batch share adapters, or name none. The adapters change every linear layer
of the blocks, or the queries, keys and values only. An engine in this process computes them.
"""

import random
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.answers import answers
from benchmarks.harness import Benchmark, Figures, by_turns, seconds_of
from benchmarks.models import cached_model
from benchmarks.weights import MEASURED, SHAPES
from nightjar.checkpoints import ModelConfig, ModelDirectory
from nightjar.checkpoints.adapters import adapted_shapes
from nightjar.gpu_worker.engine import Engine, EngineConfig
from nightjar.gpu_worker.models import load_model
from nightjar.requests import GenerateRequest, RankRequest, Request, SamplingParams

SIZES = {"adapters": 8, "rank": 16, "together": 48, "prompt": 96, "answer": 32, "documents": 8}
SIZES |= {"document": 16}
ADAPTERS, RANK, TOGETHER, PROMPT, ANSWER, DOCUMENTS, DOCUMENT = SIZES.values()
ATTENTION = ("query_key_value", "query", "key", "value")
TOKENS = {"texts": PROMPT + ANSWER, "rankings": PROMPT + DOCUMENTS * DOCUMENT}
"""Of a request."""


def factors(config: ModelConfig, seed: int, projections: Sequence[str]) -> dict[str, torch.Tensor]:
    """Random factors of an adapter of these projections in every layer."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for projection, (inputs, outputs) in adapted_shapes(config).items():
        for layer in range(config.n_layers) if projection in projections else ():
            down = torch.randn(RANK, inputs, generator=generator) * inputs**-0.5
            up = torch.randn(outputs, RANK, generator=generator) * 0.02
            found |= {f"{layer}.{projection}.down": down, f"{layer}.{projection}.up": up}
    return found


def registered(engine: Engine, config: ModelConfig) -> dict[str, list[str | None]]:
    """Register the adapters; returns the keys that each kind of micro-batch names in turn."""
    keys: dict[str, list[str | None]] = {"base": [None]}
    kinds = {"every": tuple(adapted_shapes(config)), "attention": ATTENTION}
    for number, (kind, projections) in enumerate(kinds.items()):
        keys[kind] = [f"{kind}-{index}" for index in range(ADAPTERS)]
        for index in range(ADAPTERS):
            made = factors(config, 100 * number + index, projections)
            engine.register_adapter(f"{kind}-{index}", made)
    return keys


def micro_batch(
    drawn: random.Random, work: str, keys: list[str | None], vocab_size: int
) -> list[Request]:
    """Prompts that are continued, or queries with documents."""
    words, sampling = range(100, vocab_size), SamplingParams(ANSWER, ignore_eos=True)
    asked: list[Request] = []
    for number in range(TOGETHER):
        prompt, adapter = drawn.sample(words, PROMPT), keys[number % len(keys)]
        if work == "texts":
            asked.append(GenerateRequest(number, prompt, sampling, adapter=adapter))
        else:
            documents = [drawn.sample(words, DOCUMENT) for _ in range(DOCUMENTS)]
            asked.append(RankRequest(number, prompt, documents, adapter=adapter))
    return asked


def measure(args: Namespace, _: Path) -> Figures:
    """All kinds of micro-batch in turn; the first of each is not counted."""
    directory = ModelDirectory.open(cached_model(args.model))
    model = load_model(directory, args.dtype)
    engine = Engine(model, directory.tokenizer().token_bytes, EngineConfig())
    keys, drawn = registered(engine, directory.config), random.Random(0)

    def seconds(work: str, named: list[str | None]) -> float:
        asked = micro_batch(drawn, work, named, directory.config.vocab_size)
        return seconds_of(lambda: answers(engine, asked))

    found: Figures = {name: vars(args)[name] for name in ("model", "dtype", "rounds")} | SIZES
    for work, tokens in TOKENS.items():
        ways = {kind: partial(seconds, work, named) for kind, named in keys.items()}
        took = by_turns(ways, args.rounds, warm=1)
        for kind, times in took.items():
            found[f"{work}_{kind}_tokens_per_s"] = TOGETHER * tokens / median(times)
            ratios = (a / b for a, b in zip(took["base"], times, strict=True))
            found[f"{work}_{kind}_to_base"] = median(ratios)
    return found


OPTIONS = {
    "--model": (MEASURED[0], "its shape; the weights are random", SHAPES),
    "--dtype": ("fp32", "its precision"),
    "--rounds": (6, "each has a micro-batch of every kind"),
}
BENCHMARK = Benchmark("lora", __doc__, measure, options=OPTIONS)

if __name__ == "__main__":
    BENCHMARK.main()
