"""CTranslate2: its own converter, its own batching by tokens, its callback for stop strings."""

from pathlib import Path

import ctranslate2
import transformers
from ctranslate2.converters import TransformersConverter

from . import protocol
from .protocol import Generated, Generation, Pair, Rows, System

COMPUTE_TYPES = {"fp32": "float32", "int8": "int8"}
BATCH_TOKENS = 4096
BATCH = 32


class CTranslate2(System):
    """One replica with all threads; sorted batches, which its own `max_batch_size` makes."""

    def __init__(self) -> None:
        self.versions = {"ctranslate2": ctranslate2.__version__}
        self.settings = (
            f"generate_batch in batches of {BATCH} sorted by length, the callback ends each row "
            f"at its stop; score_batch in batches of {BATCH_TOKENS} tokens"
        )

    def load(self, model: Path, precision: str, threads: int, converted: Path) -> None:
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

    def generate(self, requests: list[Generation]) -> list[Generated]:
        return protocol.in_batches(requests, lambda one: len(one.token_ids), BATCH, self._generate)

    def _generate(self, batch: list[Generation]) -> list[Generated]:
        rows = Rows(batch)

        def on_token(result: ctranslate2.GenerationStepResult) -> bool:
            return rows.append(result.batch_id, self._pieces[result.token_id])

        self._generator.generate_batch(
            [[self._tokens[token] for token in request.token_ids] for request in batch],
            max_length=max(request.max_tokens for request in batch),
            sampling_topk=1,
            beam_size=1,
            include_prompt_in_result=False,
            callback=on_token,
        )
        return rows.generated()

    def score(self, pairs: list[Pair]) -> list[float]:
        results = self._generator.score_batch(
            [[self._tokens[token] for token in query + document] for query, document in pairs],
            max_batch_size=BATCH_TOKENS,
            batch_type="tokens",
        )
        return [
            -sum(result.log_probs[-len(document) :]) / len(document)
            for result, (_, document) in zip(results, pairs, strict=True)
        ]


if __name__ == "__main__":
    protocol.serve(CTranslate2())
