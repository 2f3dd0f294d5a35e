"""What products, keys and values in FP8 cost in accuracy, emulated on a CPU: beside fp32.

The demo model answers and ranks rows kept out of its training, in four precisions, with a whole
cache and with one in FP8.  Rows, weights, keys and values get the same codes and scales, bit for
bit, as a GPU would give the same numbers.  Texts are also passed through the model at once, each
row with the cached keys before it: their loss, and the divergence of the distributions from those
of fp32.
"""

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from benchmarks.accuracy import SIZES, Answers, Work, agreement, answer, judged_rightly, work_of
from benchmarks.harness import DATA, Benchmark, Figures
from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import EngineConfig
from nightjar.gpu_worker.models import Decoder, load_model
from nightjar.gpu_worker.verify.plain_forward import BLOCK_SIZE, batch_of_text

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
READ = 400
"""Texts for the loss: half of them chats, half reviews."""


def measure(args: Namespace, _: Path) -> Figures:
    """Each precision with both caches held against fp32."""
    directory = ModelDirectory.open(args.model)
    tokenizer, work = directory.tokenizer(), work_of(args, directory)
    texts = [tokenizer.encode(text) for text in read(work)]
    found: dict[str, dict[str, float]] = {}
    exact: tuple[Answers, list[Tensor]] | None = None
    for name in PRECISIONS:
        model = load_model(directory, name)
        for fp8, key in ((False, name), (True, f"{name}+fp8-kv")):
            config = EngineConfig(fp8_cache=fp8)
            given = answer(model, tokenizer.token_bytes, work.prompts, work.rankings, config)
            chances = [log_chances(model, ids, fp8=fp8) for ids in texts]
            exact = exact or (given, chances)
            found[key] = agreement(given, exact[0]) | losses(texts, chances, exact[1])
            found[key] |= judged_rightly(model, tokenizer.token_bytes, work, config)
            print(json.dumps({key: found[key]}), flush=True)
    shape = {"head_size": directory.config.head_size, "layers": directory.config.n_layers}
    return {"demo_model": SIZES | shape | {"read_texts": READ, "by_precision": found}}


def read(work: Work) -> Iterator[str]:
    """Texts as the model was trained on: chats with their answers, and reviews."""
    for turn in work.turns[: READ // 2]:
        yield f"{turn.prompt} {turn.answer}"
    for review in work.reviews[: READ - READ // 2]:
        yield review.prompt


@torch.inference_mode()
def log_chances(model: Decoder, ids: Sequence[int], *, fp8: bool) -> Tensor:
    """The logarithms of the next token's chances after every token but the last: [T - 1, V]."""
    cache = model.allocate_cache(-(-len(ids) // BLOCK_SIZE), BLOCK_SIZE, fp8=fp8)
    hidden = model.forward(batch_of_text(ids), cache)
    return model.logits(hidden[:-1]).log_softmax(-1)


def losses(
    texts: Sequence[Sequence[int]], found: Sequence[Tensor], exact: Sequence[Tensor]
) -> dict[str, float]:
    """The loss, and the divergence from the exact chances; both in nats a token."""
    nlls: list[float] = []
    divergences: list[float] = []
    equal: list[bool] = []
    for ids, ours, theirs in zip(texts, found, exact, strict=True):
        targets = torch.tensor(ids[1:]).unsqueeze(-1)
        nlls += (-ours.gather(-1, targets)).flatten().tolist()
        divergences += (theirs.exp() * (theirs - ours)).sum(-1).tolist()
        equal += (ours.argmax(-1) == theirs.argmax(-1)).tolist()
    return {
        "loss": round(mean(nlls), 5),
        "mean_divergence": round(mean(divergences), 6),
        "equal_next_tokens": round(sum(equal) / len(equal), 4),
        "read_tokens": len(nlls),
    }


BENCHMARK = Benchmark("fp8_accuracy", __doc__, measure, options=DATA)

if __name__ == "__main__":
    BENCHMARK.main()
