"""A request's answer is the same to the last bit in any company: at the sizes of real products.

The tiny models of other tests stay on oneDNN's small paths; these are as wide as GPT-2-small.
"""

import numpy as np
import pytest
import torch

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import (
    BeamSearch,
    GenerateRequest,
    RankRequest,
    SamplingParams,
)
from nightjar.gpu_worker.models import load_model
from tests.engines import random_ids, run
from tests.models import Gpt2Shape, save_gpt2

WIDE = Gpt2Shape(n_layer=2, n_embd=768, n_head=12, n_positions=512, vocab_size=2048)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return ModelDirectory.open(save_gpt2(tmp_path_factory.mktemp("models") / "wide", WIDE))


@pytest.fixture(scope="module", params=["fp32", "bf16", "int8"])
def model(request, directory):
    return load_model(directory, request.param)


@pytest.fixture(scope="module")
def token_bytes(directory):
    return directory.tokenizer().token_bytes


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def requests():
    """Texts of all kinds and rankings; some of them begin alike."""
    rng = np.random.default_rng(0)
    system = random_ids(rng, 40, WIDE.vocab_size)
    kinds = [
        {},
        {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
        {"temperature": 1.2, "top_k": 30, "n": 3},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"beams": BeamSearch(3), "n": 2},
        {"temperature": 0.7, "min_p": 0.05},
        {"temperature": 0.7, "top_a": 0.2},
    ]
    made = []
    for i, params in enumerate(kinds):
        prompt = system[: 40 * (i % 2)] + random_ids(rng, 3 + 17 * i, WIDE.vocab_size)
        sampling = SamplingParams(6, seed=i, ignore_eos=True, **params)
        made.append(GenerateRequest(i, prompt, sampling))
    for i, top_n in ((10, None), (11, 2)):
        documents = [random_ids(rng, 1 + 5 * k, WIDE.vocab_size) for k in range(6)]
        made.append(
            RankRequest(i, system + random_ids(rng, i, WIDE.vocab_size), documents, top_n=top_n)
        )
    return made


def test_no_bit_depends_on_company_order_or_limits(model, token_bytes):
    batch = requests()
    together = run(model, token_bytes, batch)
    assert run(model, token_bytes, batch[::-1], max_step_tokens=100, max_running=5) == together
    for request in batch:
        alone = run(model, token_bytes, [request], max_step_tokens=33)
        assert alone[request.request_id] == together[request.request_id]


def test_no_bit_depends_on_the_number_of_threads(model, token_bytes, threads):
    batch = requests()
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(run(model, token_bytes, batch))
    assert found[0] == found[1] == found[2]
