"""Steps that the host packs, in padded shapes and recorded: a tape (tape.py) in a graph's place."""

import logging
import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nightjar import kernels
from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import BeamSearch, RankRequest
from nightjar.gpu_worker.models import TokenBatch, load_model, padded_batch, padded_steps
from nightjar.gpu_worker.models.graphs import NotRecordedError, eager
from nightjar.gpu_worker.models.padded_batch import PaddedBatch, padded, shape_of
from nightjar.gpu_worker.models.padded_steps import PaddedSteps, most_step_bytes
from nightjar.kernels import Branch, BranchLayout, Chunk, ChunkLayout, PagedLayout
from nightjar.kernels.reference.fp8_rows import quantised
from tests.cuda_host.findings import KernelFault
from tests.engine_cuda.models import GPU_FAMILY
from tests.engine_cuda.requests import engine_of, prompt
from tests.engine_cuda.tape import Tapes
from tests.engines import assert_nothing_held, drain, generate
from tests.families import Case, save_family
from tests.kernels_cuda.devices import run_on_host

ON_HOST = pytest.mark.parametrize("device", ["host"], indirect=True)

SIZE = 32  # tokens of a block


def step(chunks=(), running=(), wanted=None, first_block=0, **more):
    """A step in the host's memory: chunks (start, end), and running sequences of these lengths.

    Each has blocks of its own; wanted: the last rows of each chunk whose hidden states are wanted.
    """
    spans = [*chunks, *((length - 1, length) for length in running)]
    blocks, rows, outputs, end = first_block, [], [], 0
    tables = []
    for number, (start, stop) in enumerate(spans):
        count = -(-stop // SIZE)
        tables.append(list(range(blocks, blocks + count)))
        blocks += count
        rows += [(tables[-1][i // SIZE], i % SIZE, i) for i in range(start, stop)]
        end += stop - start
        last = 1 if wanted is None or number >= len(chunks) else wanted[number]
        outputs += range(end - last, end)
    places = torch.tensor(rows).T.contiguous()
    bounds = zip(tables, chunks, strict=False)
    prefill = [Chunk(table, *bound) for table, bound in bounds]
    given = {
        "token_ids": (places[2] * 7 + 11 * places[0]) % 320,
        "positions": places[2],
        "vector_bases": torch.zeros_like(places[2]),
        "prompt_vectors": None,
        "write_blocks": places[0],
        "write_offsets": places[1],
        "prefill": ChunkLayout.build(prefill, SIZE) if chunks else None,
        "decode": PagedLayout.build(tables[len(chunks) :], running, SIZE) if running else None,
        "branch": None,
        "output_rows": torch.tensor(outputs, dtype=torch.int64),
    }
    return TokenBatch(**(given | more))


def filled_cache(model, blocks=16, *, fp8=False):
    """A cache of random keys and values."""
    cache = model.allocate_cache(blocks, SIZE, fp8=fp8)
    generator = torch.Generator().manual_seed(1)
    for name in ("keys", "values"):
        numbers = torch.randn(getattr(cache, name).shape, generator=generator)
        if cache.scales is not None:
            numbers, exponents = quantised(numbers)
            getattr(cache.scales, name).copy_(exponents)
        getattr(cache, name).copy_(numbers)
    return cache


STEPS = {
    "prompts": step([(0, 5), (33, 40)]),
    "running": step(running=[3, 40, 64]),
    "both": step([(0, 9), (40, 41), (64, 70)], [5, 32, 33]),
    "unfinished chunks": step([(0, 20), (3, 9)], [7], wanted=[0, 1]),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kind", ["gpt", pytest.param("family", marks=pytest.mark.slow)])
def test_a_padded_step_computes_and_writes_what_the_step_does(device, request, kind, name):
    """Nothing else of the cache is touched."""
    model, batch = load_model(request.getfixturevalue(kind), "fp32", device), STEPS[name]
    whole, cache = filled_cache(model), filled_cache(model)
    before = cache.keys.clone()
    with torch.inference_mode():
        wanted = model.forward(batch.to(model.device), whole)
        found = PaddedSteps(model, cache, slots=16).forward(batch, eager)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache.keys, whole.keys, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache.values, whole.values, rtol=1e-5, atol=1e-5)
    others = torch.ones(before.shape[1], SIZE, dtype=torch.bool)
    others[batch.write_blocks, batch.write_offsets] = False
    assert not (cache.keys != before).any(-1).any(2).cpu()[:, others].any()


@ON_HOST
@pytest.mark.parametrize("name", STEPS)
def test_a_padded_step_with_a_cache_in_fp8(on_device, name):
    """The same, of codes and scales.

    On the host, because last bits that differ elsewhere may round a number to another code.
    """
    batch, whole = STEPS[name], filled_cache(on_device, fp8=True)
    cache, before = (filled_cache(on_device, fp8=True) for _ in range(2))
    with torch.inference_mode():
        wanted = on_device.forward(batch.to(on_device.device), whole)
        found = PaddedSteps(on_device, cache, slots=16).forward(batch, eager)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    others = torch.ones(before.keys.shape[1], SIZE, dtype=torch.bool)
    others[batch.write_blocks, batch.write_offsets] = False
    for got, made, old in zip(
        *((x.keys, x.values, x.scales.keys, x.scales.values) for x in (cache, whole, before)),
        strict=True,
    ):
        assert torch.equal(got, made)
        assert torch.equal(got.transpose(2, 3)[:, others], old.transpose(2, 3)[:, others])


PARTS = (
    *("token_ids", "positions", "write_blocks", "write_offsets", "output_rows"),
    *("tables", "spans", "tiles", "block_tables", "lengths"),
)


@ON_HOST
@pytest.mark.parametrize("stale", [None, *PARTS])
def test_a_recording_reads_nothing_of_the_step_before(on_device, monkeypatch, stale):
    """Of two steps of one shape, the second has other numbers in every part, and fewer of them.

    One part that stays as it was would change what is computed.
    """
    first = step([(0, 12), (33, 64)], [40, 65, 3, 96])
    second = step([(20, 58)], [33, 5], first_block=5)
    assert shape_of(first) == shape_of(second)
    wanted_cache, cache = filled_cache(on_device, 20), filled_cache(on_device, 20)
    monkeypatch.setattr(padded_steps, "RECORDED_AT", 1)
    put, parts = kernels.put, []

    def leaving(target, numbers):
        """Put all numbers but those of the stale part."""
        old = target.clone()
        put(target, numbers)
        if parts:
            at = parts[PARTS.index(stale)]
            target[at] = old[at]

    with torch.inference_mode():
        padding, tapes = PaddedSteps(on_device, wanted_cache, slots=8), Tapes(run_on_host)
        padding.forward(first, eager)
        wanted = padding.forward(second, eager).clone()
        padding = PaddedSteps(on_device, cache, slots=8)
        padding.forward(first, tapes)
        if stale is not None:
            monkeypatch.setattr(kernels, "put", leaving)
            parts = ranges(first, on_device)
        found = None
        with suppress(KernelFault if stale is not None else ()):  # the host sees some at once
            found = padding.forward(second, tapes)
    same = found is not None and torch.equal(found, wanted)
    assert (same and torch.equal(cache.keys, wanted_cache.keys)) == (stale is None)
    assert [tape.replays for tape in tapes.tapes] == [2]


def ranges(batch, model):
    """Where each part of a step of this shape lies in its one tensor."""
    rows = PaddedBatch(shape_of(batch), model.config, model.cache_dtype, "cpu").rows
    prefill, decode = rows.prefill, rows.decode
    found = (
        *(rows.token_ids, rows.positions, rows.write_blocks, rows.write_offsets, rows.output_rows),
        *(prefill.tables, prefill.spans, prefill.tiles, decode.tables, decode.lengths),
    )
    ends = np.cumsum([-(-part.nbytes // 8) for part in found])
    return [slice(end - -(-part.nbytes // 8), end) for end, part in zip(ends, found, strict=True)]


def mixed_requests(rng, count):
    """Prompts that begin alike, with several samples, and some that need the host at each step."""
    kinds = (
        {},
        {"temperature": 0.9, "seed": 4, "top_k": 30},
        {"logprobs": 2},
        {"n": 3, "temperature": 1.1, "seed": 5},
        {"repetition_penalty": 1.4, "min_tokens": 2, "stop_token_ids": (7,)},
        {"beams": BeamSearch(2)},
    )
    found = []
    for number in range(count):
        beginning = prompt(80, rng.randrange(2))[: rng.choice((0, 8, 32, 45))]
        ids = beginning + prompt(rng.choice((1, 9)), rng.randrange(1000))
        kind = kinds[number % len(kinds)]
        found.append(generate(number, ids, max_tokens=rng.choice((2, 5)), **kind))
    documents = [prompt(4, 1), prompt(9, 2)]
    return [*found, RankRequest(count, prompt(40), documents)]


def results_of(model, texts, requests, record, **config):
    """The results, where some requests come while others run."""
    engine, results = engine_of(model, texts, **config), {}
    engine.windows.steps.record = record
    for request in requests[::2]:
        engine.submit(request)
    for late in requests[1::2]:
        results |= {result.request_id: result for result in engine.step()}
        engine.submit(late)
    results |= drain(engine)
    assert engine.windows is not None
    assert engine.windows.steps.padded.recordings_held <= padded_steps.RECORDINGS_HELD
    assert_nothing_held(engine)
    return results


@ON_HOST
@pytest.mark.parametrize(
    ("name", "precision", "count", "config"),
    [
        ("gpt", "fp16", 6, {"max_step_tokens": 40, "window_steps": 2}),
        ("gpt", "fp16", 4, {"window_steps": 1, "fp8_cache": True}),
        *(
            pytest.param("family", *case, marks=pytest.mark.slow)
            for case in (
                ("fp32", 8, {"max_running": 5}),
                ("bf16", 9, {"max_step_tokens": 33}),
                ("bf16", 7, {"max_step_tokens": 64, "window_steps": 3}),
            )
        ),
    ],
)
def test_recorded_steps_answer_as_launched_ones(
    device, request, monkeypatch, name, precision, count, config
):
    """To the last bit: cached beginnings, prompts in chunks, several samples, windows between.

    The recordings share their memory, and are few, so some leave and come again.
    """
    directory = request.getfixturevalue(name)
    model, texts = load_model(directory, precision, device), directory.tokenizer().token_bytes
    monkeypatch.setattr(padded_steps, "RECORDED_AT", 1)
    monkeypatch.setattr(padded_steps, "RECORDINGS_HELD", 3)
    requests, tapes = mixed_requests(random.Random(count), count), Tapes(run_on_host)
    found = results_of(model, texts, requests, tapes, **config)
    assert found == results_of(model, texts, requests, eager, **config)
    of_hosts = [tape for tape in tapes.tapes if tape not in tapes.of_windows]
    with_prompts = [tape for tape in of_hosts if "paged_prefill" in tape.launches]
    assert with_prompts
    assert sum(tape.replays for tape in of_hosts) > 1


@ON_HOST
def test_a_shape_is_recorded_when_it_recurs_and_few_are_held(on_device, monkeypatch):
    monkeypatch.setattr(padded_steps, "RECORDINGS_HELD", 2)
    monkeypatch.setattr(padded_steps, "SHAPES_COUNTED", 2)
    steps, tapes = PaddedSteps(on_device, filled_cache(on_device), slots=8), Tapes(run_on_host)

    def run(*chunk):
        steps.forward(step([chunk]), tapes)
        return len(tapes.tapes), steps.recordings_held

    with torch.inference_mode():
        small, larger, largest = (0, 3), (0, 20), (0, 33)
        assert [run(*small) for _ in range(4)] == [(0, 0), (0, 0), (1, 1), (1, 1)]
        assert [run(*larger) for _ in range(3)] == [(1, 1), (1, 1), (2, 2)]
        assert run(*small) == (2, 2)
        # The third takes the place of the one that was used least recently.
        assert [run(*largest) for _ in range(3)] == [(2, 2), (2, 2), (3, 2)]
        assert run(*small) == (3, 2)
        assert [run(*larger) for _ in range(3)] == [(3, 2), (3, 2), (4, 2)]
        # A use that is long ago does not count.
        for chunk in ((0, 3), (0, 33)):
            run(*chunk)
        counts = [run(0, rows) for rows in (60, 60, 70, 130, 60)]
    assert counts[-1] == (5, 2)


@ON_HOST
def test_a_step_that_cannot_be_recorded_is_launched(on_device, texts, caplog, monkeypatch):
    """Said once; nothing is recorded after that."""
    tried = []

    def broken(recorded):
        tried.append(recorded)
        raise NotRecordedError("operation failed during capture")

    monkeypatch.setattr(padded_steps, "RECORDED_AT", 2)
    requests = mixed_requests(random.Random(3), 4)
    wanted = results_of(on_device, texts, requests, eager, window_steps=1)
    with caplog.at_level(logging.ERROR):
        assert results_of(on_device, texts, requests, broken, window_steps=1) == wanted
    assert len(tried) == 1
    (said,) = caplog.records
    assert said.action == "step_not_recorded"


BRANCHES = BranchLayout.build([Branch(2, 16, 0)], [[0]], [5])


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        (step([(0, 5)]), (16, 8, 64, 0, 0)),
        (step(running=[3, 40]), (0, 0, 0, 8, 4)),
        (step([(0, 33), (7, 8)], [160]), (64, 8, 64, 8, 8)),
        (step([(i, i + 1) for i in range(9)], [1] * 9), (128, 64, 64, 16, 4)),
        (step([(2100, 2101)]), (16, 8, 512, 0, 0)),
        (step([(0, 1000)]), (1024, 8, 64, 0, 0)),
        (step([(0, 1025)]), None),
        (step([(0, 1)] * 65), None),
        (step([(0, 2)], wanted=[2]), (16, 8, 64, 0, 0)),
        (step([(0, 9)], wanted=[9]), None),
        (step(running=[SIZE * 4096] * 8), (0, 0, 0, 8, 4096)),
        (step(running=[SIZE * 4096] * 9), None),
        (step([(0, 5)], branch=BRANCHES), None),
        (step([(0, 5)], prompt_vectors=torch.zeros(1, 8)), None),
        (step([(0, 5)], adapted=object()), None),
        (step([(0, 5)], arrivals=object()), None),
        (step([(0, 5)], output_rows=None), None),
        (step(running=[3, 40], output_rows=torch.tensor([1])), None),
    ],
)
def test_the_shape_of_a_step(batch, shape):
    assert shape_of(batch) == shape


def test_shapes_are_few_and_little_is_padded():
    sizes = {padded(count, 16) for count in range(1, padded_batch.MOST_PROMPT_ROWS + 1)}
    assert sorted(sizes)[:8] == [16, 32, 64, 128, 160, 192, 224, 256]
    assert len(sizes) == 16
    for count in range(1, 2000):
        assert count <= padded(count, 8) <= max(128, 1.25 * count)


class Allocated(TorchDispatchMode):
    """Adds up the bytes of all tensors that a step makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        given = set(map(memory, tensors_in((args, kwargs))))
        made = {memory(x): x.untyped_storage().nbytes() for x in tensors_in(found)}
        self.bytes += sum(size for address, size in made.items() if address not in given)
        return found


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def memory(tensor):
    return tensor.untyped_storage().data_ptr()


@ON_HOST
@pytest.mark.parametrize("kind", ["gpt", "qwen3"])
def test_the_memory_of_a_recorded_step_is_bounded(device, gpt, kind, tmp_path, monkeypatch):
    """All that one layer makes at the widest shape: a recording holds no more at any time."""
    monkeypatch.setattr(padded_batch, "MOST_PROMPT_ROWS", 32)
    monkeypatch.setattr(padded_steps, "MOST_PROMPT_ROWS", 32)
    monkeypatch.setattr(padded_batch, "MOST_DECODE_POSITIONS", 8 * 4 * SIZE)
    monkeypatch.setattr(padded_steps, "MOST_DECODE_POSITIONS", 8 * 4 * SIZE)
    directory = gpt
    if kind != "gpt":
        changes = GPU_FAMILY.changes | {"num_hidden_layers": 1}
        directory = ModelDirectory.open(save_family(tmp_path, Case(kind, changes)))
    model, made = load_model(directory, "fp32", device), Allocated()
    padding = PaddedSteps(model, filled_cache(model), slots=8)
    batch = step([(0, 30)], [100])
    assert shape_of(batch) == (32, 8, 64, 8, 4)
    with torch.inference_mode():
        padding.forward(batch, eager)
        with made:
            padding.forward(batch, eager)
    most = most_step_bytes(model.config, model.dtype, model.cache_dtype, 8)
    assert 0.4 * most < made.bytes <= most
