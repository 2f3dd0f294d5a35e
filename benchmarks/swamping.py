"""How often the batch size changes greedy text: sums in FP16, sums in FP32, Nightjar's products.

The prompts were kept out of the demo model's training: chats, and after them the first halves of
reviews. Each is continued greedily in batches of several sizes, by one engine, in FP16.

A GPU's library adds up a few products at a time, and cuts a product of few rows into parts that are
added at the end. How many parts depends on the number of rows, and so on the batch. The study
emulates that on a CPU (`parts`): with the running sum in FP16, where small addends are swamped by a
large sum, and with the running sum in FP32. Results are rounded to FP16 in both. Everything else is
Nightjar's.
"""

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.answers import run_all
from benchmarks.harness import DATA, Benchmark, Figures
from examples.demo_training.data import STOP, load_data
from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import Engine, EngineConfig, GenerateResult
from nightjar.gpu_worker.models import Decoder, load_model
from nightjar.kernels import LayerWeights, LinearWeight
from nightjar.kernels import activation as apply_activation
from nightjar.requests import GenerateRequest, SamplingParams

BATCHES = (4, 16, 64)
MAX_TOKENS = 16
STEP = 4
"""Inputs that the first tensor cores add up exactly before they add to the running sum."""


@dataclass(frozen=True)
class EmulatedWeight(LinearWeight):
    """A product whose sums run in `sums`, in so many parts as a library takes for the rows.

    data: float32[steps, STEP, out], numbers of FP16; bias: float32[out] or None.
    """

    data: Tensor
    bias: Tensor | None
    sums: torch.dtype

    @property
    def rows_dtype(self) -> torch.dtype:
        """As LinearWeight says."""
        return torch.float16

    def linear(self, x: Tensor, activation: str | None, out_dtype: torch.dtype | None) -> Tensor:
        """As LinearWeight says; float16."""
        steps = self.data.shape[0]
        rows = x.float().view(x.shape[0], steps, STEP).transpose(0, 1)
        products = torch.bmm(rows, self.data).to(self.sums)  # [steps, T, out]
        sums = products.view(parts(x.shape[0]), -1, *products.shape[1:])
        total = sums[:, 0].clone()
        for step in range(1, sums.shape[1]):
            total += sums[:, step]
        y = total[0]
        for part in total[1:]:
            y = y + part
        y = (y if self.bias is None else y + self.bias.to(self.sums)).half()
        y = y if activation is None else apply_activation(y, activation)
        return y if out_dtype is None else y.to(out_dtype)


def parts(rows: int) -> int:
    """Into how many parts a product of so many rows is cut: fewer rows, more parts."""
    return 4 if rows <= 4 else 2 if rows <= 32 else 1


def emulated(weight: LinearWeight, sums: torch.dtype) -> EmulatedWeight:
    """Return the emulation of a product that Nightjar has packed in FP16."""
    inner, bias = getattr(weight, "inner", None), getattr(weight, "bias", None)
    if not isinstance(inner, LinearWeight):
        raise TypeError(f"{type(weight).__name__}: the study takes models without gates")
    inputs = int(inner.in_features)  # type: ignore[attr-defined]
    # A product with ones and zeros gives the packed numbers back.
    rows = inner.linear(torch.eye(inputs), None, torch.float32)
    data = rows.view(inputs // STEP, STEP, weight.out_features).contiguous()
    return EmulatedWeight(weight.out_features, data, bias, sums)


def with_sums(model: Decoder, sums: torch.dtype) -> Decoder:
    """Return the decoder with all products of its layers emulated."""
    products = ("qkv", "attention_out", "up", "down")

    def of(layer: LayerWeights) -> LayerWeights:
        changed: dict[str, Any] = {name: emulated(getattr(layer, name), sums) for name in products}
        return replace(layer, **changed)

    layers = tuple(map(of, model.weights.layers))
    weights = replace(model.weights, layers=layers, head=emulated(model.weights.head, sums))
    return Decoder(model.config, weights, model.dtype, model.cache_dtype, model.device)


def texts(
    model: Decoder, token_bytes: Sequence[bytes], prompts: Sequence[list[int]], batch: int
) -> list[list[int] | None]:
    """The greedy tokens of each prompt, so many prompts at a time; None where they overflow."""
    engine = Engine(model, token_bytes, EngineConfig())
    sampling = SamplingParams(MAX_TOKENS, stop=(STOP.encode(),))
    found: list[list[int] | None] = []
    for first in range(0, len(prompts), batch):
        together = enumerate(prompts[first : first + batch])
        # No prefix of an earlier batch: its rows would be fewer.
        engine.reset_prefix_cache()
        asked = [GenerateRequest(number, prompt, sampling) for number, prompt in together]
        found += [
            result.outputs[0].token_ids if isinstance(result, GenerateResult) else None
            for result in run_all(engine, asked)
        ]
    return found


def measure(args: Namespace, _: Path) -> Figures:
    """For each kind of sums: the share of texts that change with the batch, and beside fp32's."""
    directory, data = ModelDirectory.open(args.model), load_data(args.data)
    tokenizer = directory.tokenizer()
    prompts = [tokenizer.encode(turn.prompt) for turn in data.chat_heldout[: args.prompts]]
    halves = (tokenizer.encode(review.prompt) for review in data.reviews_heldout)
    prompts += [ids[: len(ids) // 2] for ids in islice(halves, args.prompts - len(prompts))]
    half = load_model(directory, "fp16")
    models = {
        "fp16_sums": with_sums(half, torch.float16),
        "fp32_sums": with_sums(half, torch.float32),
        "nightjar": half,
    }
    exact = texts(load_model(directory, "fp32"), tokenizer.token_bytes, prompts, BATCHES[-1])
    found: Figures = {"prompts": len(prompts), "max_tokens": MAX_TOKENS}
    for name, model in models.items():
        answers = {batch: texts(model, tokenizer.token_bytes, prompts, batch) for batch in BATCHES}
        first = answers[BATCHES[0]]
        found[name] = {
            "changed": {str(batch): differing(answers[batch], first) for batch in BATCHES[1:]},
            "unlike_fp32": {str(batch): differing(answers[batch], exact) for batch in BATCHES},
        }
        print(json.dumps({name: found[name]}), flush=True)
    return found


def differing(ours: Sequence[object], theirs: Sequence[object]) -> float:
    """The share of texts that differ."""
    pairs = zip(ours, theirs, strict=True)
    return round(sum(one != other for one, other in pairs) / len(ours), 4)


OPTIONS = {**DATA, "--prompts": (1000, "that are continued")}
BENCHMARK = Benchmark("swamping", __doc__, measure, options=OPTIONS)

if __name__ == "__main__":
    torch.set_num_threads(1)  # its tensors are small
    BENCHMARK.main()
