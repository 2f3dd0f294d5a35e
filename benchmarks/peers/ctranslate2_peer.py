"""CTranslate2: its own converter, its own batching by tokens, its callback for stop strings."""

from __future__ import annotations

from pathlib import Path

import ctranslate2
import transformers
from ctranslate2.converters import TransformersConverter

from .protocol import Generated, Generation, Ranking, UnsupportedError, cut, serve

COMPUTE_TYPES = {"fp32": "float32", "int8": "int8"}
BATCH_TOKENS = 4096
BATCH = 32


class CTranslate2:
    """One replica with all threads; sorted batches, which its own `max_batch_size` makes."""

    def __init__(self) -> None:
        self.versions = {"ctranslate2": ctranslate2.__version__}
        self.settings = (
            f"generate_batch in batches of {BATCH} sorted by length, the callback ends each row "
            f"at its stop; score_batch in batches of {BATCH_TOKENS} tokens"
        )

    def load(self, model: Path, precision: str, threads: int, converted: Path) -> None:
        if precision not in COMPUTE_TYPES:
            raise UnsupportedError(f"no {precision} on the CPU: float32 and int8 are")
        kind = COMPUTE_TYPES[precision]
        directory = converted / f"ctranslate2-{kind}"
        if not (directory / "model.bin").is_file():
            TransformersConverter(str(model)).convert(str(directory), quantization=kind, force=True)
        self._generator = ctranslate2.Generator(
            str(directory), device="cpu", compute_type=kind, inter_threads=1, intra_threads=threads
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        size = len(tokenizer)
        self._tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
        self._pieces = [tokenizer.decode([token]) for token in range(size)]

    def reset(self) -> None:
        """Nothing outlives a call."""

    def generate(self, requests: list[Generation]) -> list[Generated]:
        found: dict[int, Generated] = {}
        order = sorted(range(len(requests)), key=lambda place: len(requests[place].token_ids))
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            batch = [requests[place] for place in places]
            found.update(zip(places, self._generate(batch), strict=True))
        return [found[place] for place in range(len(requests))]

    def _generate(self, batch: list[Generation]) -> list[Generated]:
        texts = [""] * len(batch)
        counts = [0] * len(batch)

        def on_token(result: ctranslate2.GenerationStepResult) -> bool:
            row = result.batch_id
            stop, limit = batch[row].stop, batch[row].max_tokens
            texts[row] += self._pieces[result.token_id]
            counts[row] += 1
            return (stop is not None and stop in texts[row]) or counts[row] >= limit

        self._generator.generate_batch(
            [[self._tokens[token] for token in request.token_ids] for request in batch],
            max_length=max(request.max_tokens for request in batch),
            sampling_topk=1,
            beam_size=1,
            include_prompt_in_result=False,
            callback=on_token,
        )
        return [
            Generated(cut(text, request.stop), count)
            for text, request, count in zip(texts, batch, counts, strict=True)
        ]

    def rank(self, rankings: list[Ranking]) -> list[list[float]]:
        rows, sizes = [], []
        for ranking in rankings:
            for document in ranking.documents:
                rows.append([self._tokens[token] for token in ranking.query + document])
                sizes.append(len(document))
        results = self._generator.score_batch(
            rows, max_batch_size=BATCH_TOKENS, batch_type="tokens"
        )
        scores = iter(
            -sum(result.log_probs[-size:]) / size
            for result, size in zip(results, sizes, strict=True)
        )
        return [[next(scores) for _ in ranking.documents] for ranking in rankings]


if __name__ == "__main__":
    serve(CTranslate2())
