"""Throughput with LoRA adapters beside the base model's: `python -m benchmarks.lora`.

Each micro-batch has 48 requests. They share 8 adapters of rank 16, or name none. The adapters
change every linear layer of the blocks, or the queries, keys and values only. The micro-batches
take turns, so that all meet the same machine. An engine in this process computes them.
"""

import random
import statistics
import time
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.models import cached_model
from benchmarks.shapes import MEASURED, SHAPES
from benchmarks.writing import RESULTS, begun, commit, parser, write_json
from nightjar.checkpoints import ModelConfig, ModelDirectory
from nightjar.checkpoints.adapters import adapted_shapes
from nightjar.gpu_worker.engine import Engine, EngineConfig, RequestFailed
from nightjar.gpu_worker.models import load_model
from nightjar.requests import GenerateRequest, RankRequest, Request, SamplingParams

ADAPTERS, RANK, TOGETHER = 8, 16, 48
PROMPT, ANSWER, DOCUMENTS, DOCUMENT = 96, 32, 8, 16
ATTENTION = ("query_key_value", "query", "key", "value")


def factors(
    config: ModelConfig, seed: int, projections: tuple[str, ...]
) -> dict[str, torch.Tensor]:
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
    kinds = {"every": tuple(adapted_shapes(config)), "attention": ATTENTION}
    keys: dict[str, list[str | None]] = {"base": [None]}
    for number, (kind, projections) in enumerate(kinds.items()):
        keys[kind] = []
        for index in range(ADAPTERS):
            made = factors(config, 100 * number + index, projections)
            engine.register_adapter(f"{kind}-{index}", made)
            keys[kind].append(f"{kind}-{index}")
    return keys


def texts(drawn: random.Random, keys: list[str | None], vocab_size: int) -> list[Request]:
    """A micro-batch of prompts that are continued."""
    sampling = SamplingParams(ANSWER, ignore_eos=True)
    return [
        GenerateRequest(
            number,
            drawn.sample(range(100, vocab_size), PROMPT),
            sampling,
            adapter=keys[number % len(keys)],
        )
        for number in range(TOGETHER)
    ]


def rankings(drawn: random.Random, keys: list[str | None], vocab_size: int) -> list[Request]:
    """A micro-batch of queries with documents."""
    words = range(100, vocab_size)
    return [
        RankRequest(
            number,
            drawn.sample(words, PROMPT),
            [drawn.sample(words, DOCUMENT) for _ in range(DOCUMENTS)],
            adapter=keys[number % len(keys)],
        )
        for number in range(TOGETHER)
    ]


def seconds(engine: Engine, requests: list[Request]) -> float:
    """Compute a micro-batch; returns how long it took."""
    began = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for result in engine.step():
            if isinstance(result, RequestFailed):
                raise RuntimeError(result.message)  # noqa: TRY004 - no wrong type
    return time.perf_counter() - began


def measured(engine: Engine, config: ModelConfig, rounds: int) -> dict[str, Any]:
    """All kinds of micro-batch in turn; the first of each is not counted."""
    keys = registered(engine, config)
    drawn = random.Random(0)
    found: dict[str, Any] = {}
    sizes = {"texts": PROMPT + ANSWER, "rankings": PROMPT + DOCUMENTS * DOCUMENT}
    for work, make in (("texts", texts), ("rankings", rankings)):
        took: dict[str, list[float]] = {kind: [] for kind in keys}
        for _ in range(rounds + 1):
            for kind, named in keys.items():
                took[kind].append(seconds(engine, make(drawn, named, config.vocab_size)))
        for kind, times in took.items():
            tokens = TOGETHER * sizes[work]
            found[f"{work}_{kind}_tokens_per_s"] = tokens / statistics.median(times[1:])
            ratios = (a / b for a, b in zip(took["base"][1:], times[1:], strict=True))
            found[f"{work}_{kind}_to_base"] = statistics.median(ratios)
    return found


def main() -> None:
    """Measure with a model of random weights on the CPU, and write the figures."""
    arguments = parser("benchmarks.lora", __doc__)
    arguments.add_argument("--model", choices=[*SHAPES], default=MEASURED[0])
    arguments.add_argument("--dtype", default="fp32")
    arguments.add_argument("--rounds", type=int, default=6)
    options = arguments.parse_args()
    result = begun("benchmarks.lora") | {"commit": commit()}
    directory = ModelDirectory.open(cached_model(options.model))
    model = load_model(directory, options.dtype)
    engine = Engine(model, directory.tokenizer().token_bytes, EngineConfig())
    found = measured(engine, directory.config, options.rounds)
    sizes = {"model": options.model, "dtype": options.dtype, "rounds": options.rounds}
    sizes |= {"adapters": ADAPTERS, "rank": RANK, "together": TOGETHER, "prompt": PROMPT}
    sizes |= {"answer": ANSWER, "documents": DOCUMENTS, "document": DOCUMENT}
    result |= {"machine": describe(torch.get_num_threads()), **sizes, **found}
    name = f"lora-{options.model}-{options.dtype}-{result['date']}.json"
    write_json(options.out or RESULTS / name, result)


if __name__ == "__main__":
    main()
