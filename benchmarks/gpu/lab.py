"""The bench that figures are measured on: a device, its clock, and what several figures share."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.answers import answers
from nightjar.checkpoints import ModelConfig
from nightjar.gpu_worker.engine import Engine, EngineConfig
from nightjar.gpu_worker.models import Decoder, KVTensors
from nightjar.gpu_worker.models.decoder import DecoderWeights
from nightjar.kernels import LayerWeights, LinearWeight, Norm, pack_linear
from nightjar.requests import GenerateRequest, SamplingParams

from .scale import Scale

Made = TypeVar("Made")
Points = dict[str, Any]
"""What a figure gives: its points, and the details behind them; see `found`."""

BLOCK_SIZE = EngineConfig().block_size
STD = 0.02
"""GPT-2's own; the residual stream stays small enough for FP16 over 24 layers."""


class MeasuringError(Exception):
    """What was to be timed did not do its work, or cannot be told from noise."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one thing, timed several times."""

    seconds: Sequence[float]

    @property
    def median(self) -> float:
        return median(self.seconds)

    def figures(self) -> dict[str, Any]:
        """For the result; the spread is the slowest less the fastest, over the median."""
        return {
            "median_s": float(f"{self.median:.5g}"),
            "spread": round((max(self.seconds) - min(self.seconds)) / self.median, 4),
            "seconds": [float(f"{one:.5g}") for one in self.seconds],
        }


def found(details: Mapping[str, Any], **points: float) -> Points:
    """A figure's points, and what was timed for them."""
    plain = {k: one.figures() if isinstance(one, Timing) else one for k, one in details.items()}
    return {"points": points, "details": plain}


@dataclass
class Lab:
    """device: "cuda" or "cpu", where nothing that is timed means anything."""

    device: str
    scale: Scale
    _kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def half(self) -> torch.dtype:
        """FP16; on the CPU BF16, which torch multiplies in there."""
        return torch.float16 if self.device == "cuda" else torch.bfloat16

    def kept(self, key: Any, make: Callable[[], Made]) -> Made:  # noqa: ANN401
        """make(), once: figures that need the same measurement share it."""
        if key not in self._kept:
            self._kept[key] = make()
            self.collect()
        made: Made = self._kept[key]
        return made

    def batch(self, wanted: int) -> int:
        """A batch's size, no larger than the scale's largest."""
        return min(wanted, max(self.scale.batches))

    def sync(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def collect(self) -> None:
        """Give back the memory of what is not used any more."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def wall_s(self, run: Callable[[], object], *, whole: bool = True) -> float:
        """Seconds until the device has finished, the host's part included.

        whole: False for the seconds until run() has its answer.  What the device goes on with
        behind it (copies to the host's memory) is waited for, but does not count.
        """
        self.sync()
        started = time.perf_counter()
        run()
        answered = time.perf_counter()
        self.sync()
        return (time.perf_counter() if whole else answered) - started

    def rounds(self, run: Callable[[], object], warm: int = 1) -> Timing:
        """Wall time, `rounds` times after `warm` runs that do not count."""
        for _ in range(warm):
            run()
        return Timing([self.wall_s(run) for _ in range(self.scale.rounds)])

    def device_s(self, run: Callable[[], object], repeats: int = 10) -> Timing:
        """Seconds of one run on the device alone: recorded once as a CUDA graph, so that the host's
        launches do not count, and timed between events."""
        if self.device != "cuda":
            return self.rounds(run)
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # compiling cannot be recorded
        torch.cuda.current_stream().wait_stream(side)
        self.sync()
        with torch.cuda.graph(graph):
            run()
        for _ in range(3):
            graph.replay()
        seconds = []
        for _ in range(self.scale.rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3 / repeats)
        return Timing(seconds)

    def model(self, dtype: torch.dtype) -> Decoder:
        """The random decoder in one format; the one of another format is dropped."""
        key = ("model", dtype)
        if key not in self._kept:
            self.drop_model()
        return self.kept(key, lambda: random_decoder(self.scale.config(), dtype, self.device))

    def drop_model(self) -> None:
        """Free the weights."""
        self._kept = {key: value for key, value in self._kept.items() if key[0] != "model"}
        self.collect()

    def blocks(self, texts: int, tokens: int) -> int:
        """Cache blocks of an engine with room for so much, and a few more."""
        return texts * (-(-tokens // BLOCK_SIZE) + 1) + 8

    def engine(self, dtype: torch.dtype, texts: int, tokens: int, **settings: Any) -> Engine:
        """An engine with room for `texts` texts of `tokens` tokens at once."""
        model = self.model(dtype)
        block_bytes = KVTensors.block_bytes(model.config, BLOCK_SIZE, model.cache_dtype)
        limits = {"max_running": texts, "max_step_tokens": max(8192, 2 * texts)} | settings
        config = EngineConfig(kv_cache_bytes=self.blocks(texts, tokens) * block_bytes, **limits)
        # About as many bytes a token as real ones have.
        return Engine(model, [b" t%d" % token for token in range(self.scale.vocab_size)], config)

    def prompts(self, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
        """Random tokens, none of them special."""
        rng = np.random.default_rng(seed)
        return [rng.integers(2, self.scale.vocab_size, length).tolist() for length in lengths]


def generate(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    """Texts of exactly so many tokens after the prompts."""
    params = SamplingParams(tokens, ignore_eos=True)
    answers(engine, [GenerateRequest(i, prompt, params) for i, prompt in enumerate(prompts)])


@torch.inference_mode()
def random_decoder(config: ModelConfig, dtype: torch.dtype, device: str) -> Decoder:
    """A GPT of the config's shape (LayerNorm, learned positions, biases), the same for every call
    on one device."""
    generator = torch.Generator(device).manual_seed(0)
    width, inner = config.hidden_size, config.intermediate_size

    def normal(*size: int) -> Tensor:
        made = torch.empty(*size, dtype=dtype, device=device)
        return made.normal_(0.0, STD, generator=generator)

    def norm() -> Norm:
        ones = torch.ones(width, dtype=torch.float32, device=device)
        return Norm(ones, torch.zeros_like(ones), config.norm_epsilon)

    def linear(inputs: int, outputs: int) -> LinearWeight:
        return pack_linear(normal(outputs, inputs), normal(outputs))

    def layer() -> LayerWeights:
        return LayerWeights(
            attention_norm=norm(),
            qkv=linear(width, 3 * width),
            query_norm=None,
            key_norm=None,
            attention_out=linear(width, width),
            attention_post_norm=None,
            mlp_norm=norm(),
            up=linear(width, inner),
            down=linear(inner, width),
            mlp_post_norm=None,
        )

    tokens = normal(config.vocab_size, width)
    weights = DecoderWeights(
        tokens=tokens,
        positions=normal(config.context_length, width),
        rope=None,
        layers=tuple(layer() for _ in range(config.n_layers)),
        last_norm=norm(),
        head=pack_linear(tokens, None),
    )
    return Decoder(config, weights, dtype, dtype, device)
