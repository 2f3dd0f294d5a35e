"""Ids that only pad the embedding table are never chosen, however the search goes."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from nightjar.checkpoints import ModelDirectory
from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.compute.model_engine import build_engine
from nightjar.gpu_worker.engine import GenerateRequest, SamplingParams
from nightjar.gpu_worker.models import load_model
from nightjar.requests import BeamSearch
from tests.models import Gpt2Shape, save_gpt2


@pytest.fixture(scope="module", name="directory")
def padded_model(tmp_path_factory):
    """A model whose padding rows have the highest scores after any prompt."""
    path = save_gpt2(tmp_path_factory.mktemp("padded") / "model", Gpt2Shape(vocab_size=640))
    weights = load_file(path / "model.safetensors")
    opened = ModelDirectory.open(path)
    padding = list(opened.tokenizer().padding_ids)
    assert len(padding) > 50
    bias = weights["transformer.ln_f.bias"]
    weights["transformer.wte.weight"][padding] = 50 * torch.sign(bias)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return ModelDirectory.open(path)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(12, ignore_eos=True),
        SamplingParams(12, ignore_eos=True, logprobs=3),
        SamplingParams(12, temperature=1.5, seed=3, ignore_eos=True),
        SamplingParams(12, temperature=1.0, top_k=2, seed=3, n=3, ignore_eos=True),
        SamplingParams(12, ignore_eos=True, repetition_penalty=1.3),
        SamplingParams(12, ignore_eos=True, beams=BeamSearch(3)),
    ],
    ids=["greedy", "log-probabilities", "drawn", "samples", "penalty", "beams"],
)
def test_padding_is_never_chosen(sampling, directory):
    tokenizer = directory.tokenizer()
    padding = set(tokenizer.padding_ids)
    engine = build_engine(
        ComputeConfig(directory.path),
        directory,
        tokenizer,
        lambda dtype: load_model(directory, dtype),
        dtype="fp32",
    )
    for number in range(4):
        engine.submit(GenerateRequest(number, [5 + number, 9, 40], sampling))
    results = []
    while len(results) < 4:
        results += engine.step()
    assert all(hasattr(result, "outputs") for result in results), results
    chosen = [token for result in results for one in result.outputs for token in one.token_ids]
    assert len(chosen) >= 4 * 12
    assert not padding & set(chosen)
