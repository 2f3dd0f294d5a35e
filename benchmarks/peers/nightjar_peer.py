"""Nightjar's engine, in this process."""

from collections.abc import Sequence
from pathlib import Path

import torch

import nightjar
from nightjar.checkpoints import PROMPT_TOKEN, ModelDirectory
from nightjar.gpu_worker.engine import (
    Engine,
    EngineConfig,
    GenerateRequest,
    GenerateResult,
    RankRequest,
    RankResult,
    Request,
    Result,
    SamplingParams,
)
from nightjar.gpu_worker.models import load_model
from nightjar.process import keep_freed_memory, spare_what_stays

from .protocol import Generated, Generation, Ranking, System, serve


class NightjarEngine(System):
    """Everything of a call is submitted, then the engine steps until nothing is left."""

    def __init__(self) -> None:
        self.versions = {"nightjar": nightjar.__version__, "torch": torch.__version__}
        self.settings = "the engine's default configuration"
        self._next_id = 0

    def load(self, model: Path, precision: str, threads: int, converted: Path) -> None:
        torch.set_num_threads(threads)
        keep_freed_memory()  # as the product's compute process does
        directory = ModelDirectory.open(model)
        self._decoder = load_model(directory, dtype=precision)
        tokenizer = directory.tokenizer()
        self._token_bytes = tokenizer.token_bytes
        prompt_id = tokenizer.token_id(PROMPT_TOKEN)
        banned = () if prompt_id is None else (prompt_id,)
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

    def _ids(self, count: int) -> range:
        """Request ids that were not used before."""
        start, self._next_id = self._next_id, self._next_id + count
        return range(start, self._next_id)

    def generate(self, requests: list[Generation]) -> list[Generated]:
        asked = []
        for number, one in zip(self._ids(len(requests)), requests, strict=True):
            stop = () if one.stop is None else (one.stop.encode(),)
            params = SamplingParams(max_tokens=one.max_tokens, stop=stop)
            asked.append(GenerateRequest(number, one.token_ids, params))
        return [_generated(result) for result in run_all(self.engine, asked)]

    def rank(self, rankings: list[Ranking]) -> list[list[float]]:
        numbered = zip(self._ids(len(rankings)), rankings, strict=True)
        asked = [RankRequest(number, one.query, one.documents) for number, one in numbered]
        return [scores_of(result) for result in run_all(self.engine, asked)]


def run_all(engine: Engine, requests: Sequence[Request]) -> list[Result]:
    """Results in the order of the requests."""
    for request in requests:
        engine.submit(request)
    found: dict[int, Result] = {}
    while engine.has_work:
        found.update((result.request_id, result) for result in engine.step())
    return [found[request.request_id] for request in requests]


def _generated(result: Result) -> Generated:
    if isinstance(result, GenerateResult):
        return Generated(result.text.decode("utf-8", "replace"), len(result.token_ids))
    raise RuntimeError(f"no text: {result}")


def scores_of(result: Result) -> list[float]:
    """Of every document of a ranking."""
    if isinstance(result, RankResult):
        # None stands for documents that a top_n left out, and nobody asked for one.
        return [score for score in result.mean_nll if score is not None]
    raise RuntimeError(f"no scores: {result}")


if __name__ == "__main__":
    serve(NightjarEngine())
