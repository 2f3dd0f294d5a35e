"""Nightjar's engine, in this process."""

from pathlib import Path

import torch

import nightjar
from benchmarks.answers import answers, scores_of
from nightjar.checkpoints import PROMPT_TOKEN, ModelDirectory
from nightjar.gpu_worker.engine import Engine, EngineConfig, GenerateResult
from nightjar.gpu_worker.models import load_model
from nightjar.process import keep_freed_memory, spare_what_stays
from nightjar.requests import GenerateRequest, RankRequest, SamplingParams

from .protocol import Generated, Generation, Ranking, System, serve


class NightjarEngine(System):
    """Everything of a call is submitted, then the engine steps until nothing is left."""

    def __init__(self) -> None:
        self.versions = {"nightjar": nightjar.__version__, "torch": torch.__version__}
        self.settings = "the engine's default configuration"

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

    def generate(self, requests: list[Generation]) -> list[Generated]:
        asked = []
        for number, one in enumerate(requests):
            stop = () if one.stop is None else (one.stop.encode(),)
            params = SamplingParams(max_tokens=one.max_tokens, stop=stop)
            asked.append(GenerateRequest(number, one.token_ids, params))
        return [
            Generated(result.text.decode("utf-8", "replace"), len(result.token_ids))
            for result in answers(self.engine, asked)
            if isinstance(result, GenerateResult)
        ]

    def rank(self, rankings: list[Ranking]) -> list[list[float]]:
        asked = [RankRequest(n, one.query, one.documents) for n, one in enumerate(rankings)]
        return [scores_of(result) for result in answers(self.engine, asked)]


if __name__ == "__main__":
    serve(NightjarEngine())
