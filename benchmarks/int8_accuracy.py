"""What int8 and bf16 cost in accuracy: their texts, scores and rankings beside fp32's.

The demo model answers and ranks rows kept out of its training.
"""

import json
from argparse import Namespace
from pathlib import Path

from benchmarks.accuracy import SIZES, Answers, agreement, answer, judged_rightly, work_of
from benchmarks.harness import DATA, Benchmark, Figures
from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import EngineConfig
from nightjar.gpu_worker.models import load_model


def measure(args: Namespace, _: Path) -> Figures:
    """Each precision held against fp32, on rows kept out of the model's training."""
    directory, config = ModelDirectory.open(args.model), EngineConfig()
    token_bytes, work = directory.tokenizer().token_bytes, work_of(args, directory)
    found: dict[str, dict[str, float]] = {}
    exact: Answers | None = None
    for name in ("fp32", "bf16", "int8"):
        model = load_model(directory, name)
        given = answer(model, token_bytes, work.prompts, work.rankings, config)
        exact = exact or given
        found[name] = agreement(given, exact)
        found[name] |= judged_rightly(model, token_bytes, work, config)
        print(json.dumps({name: found[name]}), flush=True)
    return {"demo_model": SIZES | {"by_precision": found}}


BENCHMARK = Benchmark("int8_accuracy", __doc__, measure, options=DATA)

if __name__ == "__main__":
    BENCHMARK.main()
