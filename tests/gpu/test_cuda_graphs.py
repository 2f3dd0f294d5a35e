"""Recorded steps compute what launched ones do, to the last bit."""

import logging

import pytest

from nightjar.gpu_worker.engine import GenerateRequest, SamplingParams
from nightjar.gpu_worker.models import load_model, padded_steps
from tests.engines import run
from tests.models import SENTENCES


def requests(tokenizer):
    """Texts of every kind that a recorded step may serve, ending at different steps."""
    kinds = (
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.1, "top_k": 20, "n": 2},
        {"repetition_penalty": 1.3, "stop": (b"a", b" ")},
        {"logprobs": 3},  # as long as it lives, steps go the host's way
        {"min_tokens": 3, "stop_token_ids": (7, 40)},
        {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    )
    prompts = tokenizer.encode_batch(SENTENCES)
    return [
        GenerateRequest(
            i,
            prompt[: 5 + 9 * i],
            SamplingParams(3 if "logprobs" in kind else 5 + 6 * i, seed=i, **kind),
        )
        for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]


def company(tokenizer):
    """Eight texts, the places of a window, until all of them end at once: a step has as many rows
    whether the host or the device takes it, and so the same products."""
    kinds = (
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.1, "top_k": 20},
        {"temperature": 0.9, "min_p": 0.05},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 0.7, "repetition_penalty": 1.1},
        {},
    )
    prompt = tokenizer.encode_batch(SENTENCES)[0]
    return [
        GenerateRequest(i, prompt[: 3 + i], SamplingParams(40, seed=i, ignore_eos=True, **kind))
        for i, kind in enumerate(kinds)
    ]


def crowd(tokenizer):
    """More texts than a product of few rows takes, all of them drawn, that end one by one: places
    of 32, 16 and 8."""
    prompts = tokenizer.encode_batch(SENTENCES)
    kinds = (
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.1, "top_k": 20, "n": 2},
        {"temperature": 0.7, "repetition_penalty": 1.3, "stop": (b"a", b" ")},
    )
    return [
        GenerateRequest(
            i, prompts[i % 7][: 5 + 2 * i], SamplingParams(12 + 3 * i, seed=i, **kinds[i % 3])
        )
        for i in range(18)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("asking", "change"),
    [
        (requests, {"cuda_graphs": False}),
        (crowd, {"cuda_graphs": False}),
        (company, {"window_steps": 1}),
    ],
    ids=["graphs", "graphs of many", "windows"],
)
def test_graphs_and_windows_change_no_bit(llama, precision, asking, change, caplog):
    """And neither fails and is given up, which the engine would survive."""
    model, tokenizer = load_model(llama, precision, "cuda"), llama.tokenizer()
    asked = asking(tokenizer)
    with caplog.at_level(logging.WARNING):
        recorded = run(model, tokenizer.token_bytes, asked)
        launched = run(model, tokenizer.token_bytes, asked, **change)
    assert recorded == launched
    assert len(recorded) == len(asked)
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_recorded_prompts_change_no_bit(llama, precision, monkeypatch, caplog):
    """Whole prompts and their later parts, beside running texts; each shape at its first use."""
    monkeypatch.setattr(padded_steps, "RECORDED_AT", 1)
    model, tokenizer = load_model(llama, precision, "cuda"), llama.tokenizer()
    asked = requests(tokenizer)
    found = []
    with caplog.at_level(logging.WARNING):
        for graphs in (True, False):
            given = {"max_step_tokens": 40, "window_steps": 2, "cuda_graphs": graphs}
            found.append(run(model, tokenizer.token_bytes, asked, **given))
    assert found[0] == found[1]
    assert len(found[0]) == len(asked)
    assert [record.getMessage() for record in caplog.records] == []
