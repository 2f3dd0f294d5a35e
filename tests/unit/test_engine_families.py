"""The same answer in any company and in another process: families and precisions beside GPT-2."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import BeamSearch, RankRequest
from nightjar.gpu_worker.models import load_model
from tests.engines import drawn, generate, ids, one, run
from tests.families import CASES, save_family

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("polyglot", "llama", "qwen2", "qwen3", "hyperclova x")


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("family") / "model"
    return save_family(folder, CASES[request.param], seed=5)


def requests(seed):
    """Texts of every kind and rankings, some of which begin alike; contexts up to 90 tokens."""
    rng = random.Random(seed)
    begins = [ids(n, 100 + seed) for n in (20, 33)]
    kinds = [
        {},
        {"temperature": 0.9, "seed": seed},
        {"temperature": 1.2, "top_k": 30, "n": 2, "seed": 1},
        {"logprobs": 3},
        {"beams": BeamSearch(width=3)},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    ]
    found = []
    for number, kind in enumerate(kinds):
        prompt = rng.choice([[], *begins]) + ids(rng.randint(1, 40), seed * 10 + number)
        found.append(generate(number, prompt, rng.randint(1, 12), **kind))
    for number in range(10, 13):
        documents = [
            rng.choice([[], begins[0]]) + ids(rng.randint(1, 20), number + i) for i in range(5)
        ]
        found.append(RankRequest(number, ids(rng.randint(1, 40), number), documents))
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "fp8"])
@pytest.mark.sampled
def test_no_bit_depends_on_the_company(path, precision):
    directory = ModelDirectory.open(path)
    model, token_bytes = load_model(directory, precision), directory.tokenizer().token_bytes
    for seed in range(3):
        asked = requests(seed)
        order = random.Random(seed).sample(asked, len(asked))
        limits = {"max_running": (3, 64, 5)[seed], "max_step_tokens": (40, 2048, 100)[seed]}
        together = run(model, token_bytes, order, **limits)
        for request in asked:
            assert together[request.request_id] == one(model, token_bytes, request)


PROGRAM = """
import json, sys
from pathlib import Path
from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models import load_model
from tests.engines import drawn, run
directory = ModelDirectory.open(Path(sys.argv[1]))
results = run(load_model(directory, "fp32"), directory.tokenizer().token_bytes, drawn()[::-1])
print(json.dumps({number: results[number].token_ids for number in results}))
"""


def test_a_seed_draws_the_same_text_in_another_process(directory, model, token_bytes):
    """Each alone here, all together and in another order there."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory.path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    there = json.loads(done.stdout)
    for request in drawn():
        assert there[str(request.request_id)] == one(model, token_bytes, request).token_ids
    other = one(model, token_bytes, generate(5, ids(50), 12, temperature=1.0, seed=9))
    assert other.token_ids != there["5"]
