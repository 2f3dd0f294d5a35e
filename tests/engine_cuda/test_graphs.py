"""Recorded steps, without a GPU: a tape (tape.py) in a CUDA graph's place."""

from collections import Counter
from itertools import pairwise

import pytest
import torch

from nightjar import kernels
from nightjar.gpu_worker.engine import Engine, EngineConfig
from nightjar.gpu_worker.models import load_model, padded_steps
from nightjar.kernels.cuda import launch
from nightjar.kernels.cuda.linear import TILE
from tests.engine_cuda.requests import CACHE, prompt
from tests.engine_cuda.tape import Tapes
from tests.engines import assert_nothing_held, drain, generate, run
from tests.kernels_cuda.devices import run_on_host


def engine_on_tapes(model, texts, **config):
    """An engine whose steps are played back, and their tapes."""
    engine = Engine(model, texts, EngineConfig(**(CACHE | config)))
    engine.windows.steps.record = tapes = Tapes(run_on_host)
    return engine, tapes


BATCHES = ((0, 6), (10, 9), (20, 6), (30, 9))
"""The first request and the number of requests of each."""


def batch(first, count):
    """Texts of every kind that the device continues by itself, which end at different steps."""
    kinds = (
        {},
        {"temperature": 0.9, "seed": 4, "top_k": 30},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"temperature": 1.1, "seed": 5, "top_p": 0.9, "presence_penalty": 0.7},
        {"stop": (b"e", b"th")},
    )
    return [
        generate(i, prompt(3 + 7 * i % 20, i), max_tokens=2 + i % 5, **kinds[i % 5])
        for i in range(first, first + count)
    ]


@pytest.mark.parametrize("device", ["host"], indirect=True)
@pytest.mark.parametrize(
    ("name", "precision", "batches"),
    [
        ("gpt", "fp16", (*BATCHES[:2], (20, 1))),
        pytest.param("gpt", "fp16", BATCHES, marks=pytest.mark.slow),
        pytest.param("gpt", "fp8", (*BATCHES[:2], (20, 1)), marks=pytest.mark.slow),
        pytest.param("family", "fp32", BATCHES, marks=pytest.mark.slow),
    ],
)
def test_steps_played_back_write_what_fresh_ones_write(device, name, precision, batches, request):
    """Batches of two sizes by turns, so that each tape is played after the other's, with the texts,
    lengths and cache blocks of another batch than it was recorded with."""
    directory = request.getfixturevalue(name)
    model, texts = load_model(directory, precision, device), directory.tokenizer().token_bytes
    engine, tapes = engine_on_tapes(model, texts, window_steps=3)
    for first, count in batches:
        asked = batch(first, count)
        assert drain(engine, *asked) == run(model, texts, asked, window_steps=3, **CACHE)
    assert engine.windows is not None  # else recording has failed
    assert len(tapes.of_windows) == 2
    assert all(tape.replays > 4 for tape in tapes.of_windows)
    assert_nothing_held(engine)


@pytest.mark.parametrize("device", ["host"], indirect=True)
@pytest.mark.parametrize("count", [3, 9])
def test_the_launches_of_a_step_are_counted(device, gpt, texts, count):
    """A layer of a GPT is 5 launches, of more than 8 texts 12: two products of a layer then add
    their bias and the residual stream in launches of their own. Around the layers there are the
    embedding, the last norm, the head, and 7 of choosing a token."""
    engine, tapes = engine_on_tapes(load_model(gpt, "fp16", device), texts)
    drain(engine, *(generate(i, prompt(9, i), max_tokens=4) for i in range(count)))
    (tape,) = tapes.of_windows
    launched, layers, few = Counter(tape.launches), gpt.config.n_layers, count <= 8
    # Where a GPU multiplies FP16 into FP32, the CPU first casts rows and weight.
    stand_ins = 2 * launched["aten::matmul"]
    assert launched["aten::matmul"] == (0 if few else 2 * layers + 1)
    assert len(tape.launches) - stand_ins == layers * (5 if few else 12) + 3 + 7
    products = launched["linear"] + launched["aten::linear"] + launched["aten::matmul"]
    assert products == 4 * layers + 1
    assert launched["norm"] == (1 if few else 2 * layers + 1)
    assert launched["activation"] == (0 if few else layers)
    assert launched["decode_attention"] == layers
    assert all(launched[name] == 1 for name in ("penalize", "uniform", "sample", "step_update"))


@pytest.mark.parametrize("device", ["host"], indirect=True)
def test_the_launches_and_copies_of_a_step_with_prompts_are_counted(
    device, gpt, texts, monkeypatch
):
    """Prompts with a cached beginning beside running texts. A layer is 15 launches: 12, as of more
    than 8 running texts, and for prompts one for their heads, one for their attention and one that
    puts the results together. Around the layers are the embedding, the last norm, two selections of
    the wanted rows, and a copy of the result. A graph launches all of them at once. One copy brings
    the step to the device."""
    model, copies = load_model(gpt, "fp16", device), []
    engine, tapes = engine_on_tapes(model, texts, window_steps=1)
    monkeypatch.setattr(padded_steps, "RECORDED_AT", 1)
    drain(engine, generate(0, prompt(40), max_tokens=2))
    for request in range(2, 12):
        engine.submit(generate(request, prompt(9, request), max_tokens=40))
    engine.step()

    def counted(*given, plain=kernels.put):
        copies.append(given)
        plain(*given)

    monkeypatch.setattr(kernels, "put", counted)
    engine.submit(generate(20, prompt(40), max_tokens=2))
    engine.submit(generate(21, prompt(45), max_tokens=2))
    engine.step()
    tape = tapes.tapes[-1]
    launched, layers = Counter(tape.launches), gpt.config.n_layers
    assert launched["paged_prefill"] == launched["decode_attention"] == layers
    assert launched["qkv_post"] == launched["aten::cat"] == layers
    # Where a GPU multiplies FP16 into FP32, the CPU first casts rows and weight.
    assert len(tape.launches) - 2 * launched["aten::matmul"] == 15 * layers + 5
    assert tape.replays == len(copies) == 1


@pytest.mark.parametrize("device", ["host"], indirect=True)
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("family", "fp16"),
        ("gpt", "fp8"),
        pytest.param("gpt", "fp16", marks=pytest.mark.slow),
    ],
)
def test_each_product_asks_for_what_the_next_one_reads(device, name, precision, request):
    """In the order of the step, from its head to the next step's first layer, too: of each weight
    the channels of the tiles that its blocks begin with."""
    directory = request.getfixturevalue(name)
    model, texts = load_model(directory, precision, device), directory.tokenizer().token_bytes
    products = []

    def watching(kernel, grid, block, args, shared_bytes):
        if kernel.entry == "linear":
            weight, gate, following = args[6], args[9], args[19:21]
            reads = [weight] if gate is None else [gate, weight]
            row_bytes = weight.shape[1] * weight.element_size()
            first = min(weight.shape[0], grid[0] * TILE // len(reads)), row_bytes
            asked = [one for one in following if one is not None]
            products.append((reads, first, asked, tuple(args[21:23])))
        run_on_host(kernel, grid, block, args, shared_bytes)

    with launch.using(watching):
        drain(Engine(model, texts, EngineConfig(**CACHE)), generate(1, prompt(9), max_tokens=4))
    steps = products[-2 * (4 * directory.config.n_layers + 1) :]
    assert len(steps) < len(products)
    for (*_, asked, share), (read, first, *_) in pairwise(steps):
        assert [one.data_ptr() for one in asked] == [one.data_ptr() for one in read]
        assert share == first


@pytest.mark.parametrize("bug", [None, "a number of Python's", "memory of another tape"])
def test_tapes_find_what_must_not_stay_as_it_was(bug):
    """Two steps that add one to a number, played in turns."""
    number, python, kept = torch.zeros(1), iter(range(1, 100)), []

    def step():
        if bug == "a number of Python's":
            number.fill_(next(python))
            return
        one = torch.ones(1)
        kept.append(one)
        number.add_(kept[1] if bug == "memory of another tape" and len(kept) > 3 else one)

    tapes = Tapes(run_on_host)
    steps = [tapes(step), tapes(step)]  # the second of the four runs is the first tape's
    number.zero_()
    for _ in range(3):
        for play in steps:
            play()
    assert (number.item() == 6) == (bug is None)


def test_no_tape_can_be_made_of_a_step_that_waits():
    number = torch.zeros(1)
    with pytest.raises(RuntimeError, match="local_scalar_dense: not while a graph is recorded"):
        Tapes(run_on_host)(lambda: number.fill_(number.item() + 1))
    with pytest.raises(RuntimeError, match="lift_fresh: not while a graph is recorded"):
        Tapes(run_on_host)(lambda: number.add_(torch.tensor([1.0])))
