"""Nightjar's engine, in this process."""

from __future__ import annotations

from pathlib import Path

import torch

import nightjar
from nightjar.checkpoints import PROMPT_TOKEN, CheckpointError, ModelDirectory
from nightjar.gpu_worker.engine import (
    Engine,
    EngineConfig,
    GenerateRequest,
    GenerateResult,
    RankRequest,
    RankResult,
    Request,
    RequestFailed,
    Result,
    SamplingParams,
)
from nightjar.gpu_worker.models import load_model
from nightjar.process import keep_freed_memory, spare_what_stays

from .protocol import Generated, Generation, Ranking, UnsupportedError, serve


class NightjarEngine:
    """Everything of a call is submitted, then the engine steps until nothing is left."""

    def __init__(self) -> None:
        self.versions = {"nightjar": nightjar.__version__, "torch": torch.__version__}
        self.settings = "the engine's default configuration"
        self._next_id = 0

    def load(self, model: Path, precision: str, threads: int, converted: Path) -> None:
        torch.set_num_threads(threads)
        keep_freed_memory()  # as the product's compute process does
        try:
            directory = ModelDirectory.open(model)
            decoder = load_model(directory, dtype=precision)
        except (CheckpointError, ValueError) as error:
            raise UnsupportedError(str(error)) from error
        tokenizer = directory.tokenizer()
        prompt_id = tokenizer.token_id(PROMPT_TOKEN)
        banned = () if prompt_id is None else (prompt_id,)
        self._decoder, self._token_bytes = decoder, tokenizer.token_bytes
        self.start_engine(EngineConfig(banned_token_ids=banned))
        spare_what_stays()  # the same

    def start_engine(self, config: EngineConfig) -> None:
        """Another engine over the same weights; the old one's cache is gone."""
        vars(self).pop("engine", None)
        self.config = config
        self.engine = Engine(self._decoder, self._token_bytes, config)

    def reset(self) -> None:
        """As vLLM's reset_prefix_cache: the memory stays, what it held is forgotten."""
        self.engine.reset_prefix_cache()

    def run(self, requests: list[Request]) -> list[Result]:
        """Results in the order of the requests, whose ids count up from `take_ids`."""
        for request in requests:
            self.engine.submit(request)
        found: dict[int, Result] = {}
        while self.engine.has_work:
            found.update((result.request_id, result) for result in self.engine.step())
        return [found[request.request_id] for request in requests]

    def take_ids(self, count: int) -> range:
        """Request ids that were not used before."""
        start, self._next_id = self._next_id, self._next_id + count
        return range(start, self._next_id)

    def generate(self, requests: list[Generation]) -> list[Generated]:
        ids = self.take_ids(len(requests))
        results = self.run(
            [
                GenerateRequest(
                    number,
                    request.token_ids,
                    SamplingParams(
                        max_tokens=request.max_tokens,
                        stop=() if request.stop is None else (request.stop.encode(),),
                    ),
                )
                for number, request in zip(ids, requests, strict=True)
            ]
        )
        return [_generated(result) for result in results]

    def rank(self, rankings: list[Ranking]) -> list[list[float]]:
        ids = self.take_ids(len(rankings))
        results = self.run(
            [
                RankRequest(number, ranking.query, ranking.documents)
                for number, ranking in zip(ids, rankings, strict=True)
            ]
        )
        return [_scores(result) for result in results]


def _generated(result: Result) -> Generated:
    if isinstance(result, GenerateResult):
        return Generated(result.text.decode("utf-8", "replace"), len(result.token_ids))
    raise _failure(result)


def _scores(result: Result) -> list[float]:
    if isinstance(result, RankResult):
        # None stands for documents that a top_n left out, and nobody asked for one.
        return [score for score in result.mean_nll if score is not None]
    raise _failure(result)


def _failure(result: Result) -> RuntimeError:
    if isinstance(result, RequestFailed):
        return RuntimeError(f"{result.code}: {result.message}")
    return RuntimeError(f"a result of another kind: {type(result).__name__}")


if __name__ == "__main__":
    serve(NightjarEngine())
