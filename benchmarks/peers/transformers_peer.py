"""transformers: batches of 16 sorted by length, left-padded.

A batch ends when every row has met its stop string (a StoppingCriteria that looks at each row's
text); ranking is a padded forward whose head runs on the documents' positions alone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from . import protocol
from .protocol import Generated, Generation, Pair, Rows, System

BATCH = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class RowStops(transformers.StoppingCriteria):  # type: ignore[misc]  # mypy does not read transformers
    """Ends each row at its own stop string or its own number of tokens."""

    def __init__(self, pieces: Sequence[str], rows: Rows) -> None:
        self._pieces, self._rows = pieces, rows

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if not self._rows.ended[row]:  # what follows its end is padding
                self._rows.append(row, self._pieces[token])
        return torch.tensor(self._rows.ended)


class Transformers(System):
    """The reference: every other system's texts and scores are held against its fp32."""

    def __init__(self) -> None:
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self.settings = (
            f"sorted batches of {BATCH}, sdpa attention, per-row stop strings by a "
            "StoppingCriteria; ranking: one padded forward per batch, head on document positions"
        )

    def load(self, model: Path, precision: str, threads: int, converted: Path) -> None:
        torch.set_num_threads(threads)
        # Loaded in evaluation mode; its own types do not describe what comes back.
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=DTYPES[precision], attn_implementation="sdpa"
        )
        self._model.generation_config.pad_token_id = 0
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        size = self._model.config.vocab_size
        self._pieces = [str(tokenizer.decode([token])) for token in range(size)]

    def generate(self, requests: list[Generation]) -> list[Generated]:
        return protocol.in_batches(requests, lambda one: len(one.token_ids), BATCH, self._generate)

    @torch.inference_mode()
    def _generate(self, batch: list[Generation]) -> list[Generated]:
        ids, mask = map(torch.tensor, protocol.pad_left([request.token_ids for request in batch]))
        rows = Rows(batch)
        stops = transformers.StoppingCriteriaList([RowStops(self._pieces, rows)])
        self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max(request.max_tokens for request in batch),
            stopping_criteria=stops,
        )
        return rows.generated()

    def score(self, pairs: list[Pair]) -> list[float]:
        return protocol.in_batches(pairs, lambda pair: sum(map(len, pair)), BATCH, self._score)

    @torch.inference_mode()
    def _score(self, batch: list[Pair]) -> list[float]:
        """Mean NLL of each document; left padding puts every document at the end of its row."""
        ids, mask = map(
            torch.tensor, protocol.pad_left([query + document for query, document in batch])
        )
        longest = max(len(document) for _, document in batch)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = self._model(
            ids, attention_mask=mask, position_ids=positions, logits_to_keep=longest + 1
        ).logits
        log_probs = logits[:, :-1].float().log_softmax(-1)
        taken = log_probs.gather(2, ids[:, -longest:, None]).squeeze(2)
        return [
            -float(row[-len(document) :].double().mean())
            for row, (_, document) in zip(taken, batch, strict=True)
        ]


if __name__ == "__main__":
    protocol.serve(Transformers())
