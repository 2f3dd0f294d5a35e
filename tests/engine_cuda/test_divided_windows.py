"""Windows beside sequences that need the host: the same results as single steps."""

import logging
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from nightjar.checkpoints.adapters import adapted_shapes
from nightjar.gpu_worker.engine import BeamSearch
from nightjar.gpu_worker.engine.plan import RankWork, StepPlan
from nightjar.gpu_worker.engine.window_policy import divide, most_steps
from nightjar.gpu_worker.engine.windows import DecodeWindows
from nightjar.gpu_worker.models import KVTensors, decode_steps, load_model
from tests.engine_cuda.requests import CACHE, engine_of, prompt
from tests.engine_cuda.tape import Tapes
from tests.engines import assert_nothing_held, drain, generate, run
from tests.kernels_cuda.devices import run_on_host

HOSTED = 90
"""The id of the request that needs the host."""

KINDS = {
    "logprobs": {"logprobs": 3},
    "bias": {"logit_bias": {7: 4.0, 9: -100.0}},
    "bad words": {"bad_words": ((7,), (11, 12)), "temperature": 1.0, "seed": 3},
    "beams": {"beams": BeamSearch(2), "logprobs": 1},
    "top_a": {"top_a": 0.3, "temperature": 0.5, "seed": 8},
    "min_tokens": {"min_tokens": 4, "ignore_eos": False, "stop_token_ids": (5,)},
    "samples": {"n": 2, "temperature": 0.9, "seed": 1, "logit_bias": {8: 1.0}},
}


def plain(count, max_tokens=12):
    """Requests that the device continues by itself."""
    kinds = {}, {"temperature": 0.9, "seed": 4, "top_k": 30}, {"repetition_penalty": 1.4}
    return [
        generate(i, prompt(5 + 7 * i % 20, i), max_tokens=max_tokens + i % 3, **kinds[i % 3])
        for i in range(count)
    ]


def hosted(kind, max_tokens=8, **more):
    """A request that needs the host."""
    return generate(HOSTED, prompt(9, 50), max_tokens=max_tokens, **KINDS[kind], **more)


def watch(engine):
    """Append the request ids of each decode step from now on: of windows, and of single steps."""
    events, run_plan, land = [], engine.executor.run, engine.windows.land

    def landing():
        for moved in land():
            events.append(("window", [sequence.request_id for sequence, _ in moved]))
            yield moved

    def stepping(plan):
        found = run_plan(plan)
        if not plan.prompts and not plan.ranks:
            events.append(("single", [sequence.request_id for sequence in plan.decodes]))
        return found

    engine.executor.run = stepping
    engine.windows.land = landing
    return events


def steps_of(events, where, request_id):
    """How many steps of a kind gave the request a token."""
    return sum(kind == where and request_id in ids for kind, ids in events)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("logprobs", "fp16"),
        pytest.param("beams", "fp16", marks=pytest.mark.slow),
        *((kind, "fp32") for kind in KINDS if kind not in ("logprobs", "beams")),
    ],
)
def test_one_request_that_needs_the_host_leaves_the_others_in_windows(
    device, gpt, texts, kind, dtype
):
    """In FP16 a product of up to 8 rows has the same bits whatever the rows are.

    In FP32 only the tokens are the same: the order of sums of torch's products differs.
    """
    model = load_model(gpt, dtype, device)
    requests = [*plain(5, 7), hosted(kind, 5)]
    engine = engine_of(model, texts, window_steps=4)
    events = watch(engine)
    results = drain(engine, *requests)
    assert results == run(model, texts, requests, window_steps=1, **CACHE)
    assert engine.windows is not None
    for request in requests[:5]:
        assert steps_of(events, "window", request.request_id) == request.sampling.max_tokens - 1
        assert steps_of(events, "single", request.request_id) == 0
    assert steps_of(events, "single", HOSTED) > 0
    assert_nothing_held(engine)


def test_an_adapter_leaves_the_others_in_windows(on_device, texts):
    drawn = torch.Generator().manual_seed(2)
    factors = {}
    for projection, (inputs, outputs) in adapted_shapes(on_device.config).items():
        factors[f"0.{projection}.down"] = torch.randn(3, inputs, generator=drawn) * 0.1
        factors[f"0.{projection}.up"] = torch.randn(outputs, 3, generator=drawn) * 0.2
    requests = [*plain(4), replace(generate(HOSTED, prompt(9), max_tokens=6), adapter="tuned")]
    engine = engine_of(on_device, texts, window_steps=4)
    engine.register_adapter("tuned", factors)
    events = watch(engine)
    results = drain(engine, *requests)
    assert results == run(on_device, texts, requests, {"tuned": factors}, window_steps=1, **CACHE)
    assert [steps_of(events, "single", i) for i in (0, 1, 2, 3, HOSTED)] == [0, 0, 0, 0, 5]


def test_every_kind_at_once(on_device, by_cpu, texts):
    """Twenty sequences in windows, and nine of seven requests beside them.

    Products of so many rows are cuBLAS's, so texts are compared and not bits.
    """
    kinds = [replace(hosted(kind), request_id=HOSTED + i) for i, kind in enumerate(KINDS)]
    requests = [*plain(20), *kinds]
    engine = engine_of(on_device, texts, window_steps=4)
    events = watch(engine)
    results = drain(engine, *requests)
    wanted = by_cpu(requests)
    for number, result in wanted.items():
        assert [o.token_ids for o in results[number].outputs] == [
            o.token_ids for o in result.outputs
        ]
    assert all(steps_of(events, "window", i) for i in range(20))
    assert_nothing_held(engine)


@pytest.mark.parametrize("urgent", [False, True])
def test_a_request_beside_windows_waits_for_a_bounded_number_of_steps(on_device, texts, urgent):
    """For one window, which is as long as the batch is large, and short for an urgent request."""
    engine = engine_of(on_device, texts, window_steps=4)
    events = watch(engine)
    drain(engine, *plain(6, 30), replace(hosted("top_a"), urgent=urgent))
    mine = [place for place, (_, ids) in enumerate(events) if HOSTED in ids]
    assert len(mine) == 7
    longest = max(later - earlier - 1 for earlier, later in pairwise(mine))
    assert longest == (2 if urgent else 4)


def test_a_sequence_joins_the_window_when_it_needs_the_host_no_more(on_device, texts):
    requests = [*plain(5, 20), hosted("min_tokens", 20)]
    engine = engine_of(on_device, texts, window_steps=4)
    events = watch(engine)
    results = drain(engine, *requests)
    count = len(results[HOSTED].token_ids)
    assert count > 6
    assert steps_of(events, "single", HOSTED) == 3  # the prompt's step gave the first of four
    assert steps_of(events, "window", HOSTED) == count - 4


def test_beams_beside_a_window_copy_the_blocks_in_which_they_part(on_device, texts, monkeypatch):
    """As many blocks before each step of the search as in a run of single steps."""
    copied, copy = [], KVTensors.copy

    def counted(cache, pairs):
        copied.extend([len(pairs)] if pairs else [])
        copy(cache, pairs)

    monkeypatch.setattr(KVTensors, "copy", counted)
    requests = [*plain(10), generate(HOSTED, prompt(20, 5), max_tokens=12, beams=BeamSearch(3))]
    wanted = run(on_device, texts, requests, window_steps=1, **CACHE)[HOSTED]
    by_single_steps = list(copied)
    copied.clear()
    engine = engine_of(on_device, texts, window_steps=2)
    events = watch(engine)
    found = drain(engine, *requests)[HOSTED]
    assert steps_of(events, "window", 0) > 9
    assert copied == by_single_steps
    assert len(copied) > 5
    assert found.token_ids == wanted.token_ids


def test_half_a_batch_that_needs_the_host_is_not_divided(on_device, texts):
    requests = [*plain(1, 6), hosted("top_a")]
    engine = engine_of(on_device, texts, window_steps=4)
    events = watch(engine)
    assert drain(engine, *requests) == run(on_device, texts, requests, window_steps=1, **CACHE)
    assert steps_of(events, "window", 0) == 0


def test_a_slot_that_becomes_free_beside_a_window_is_filled(on_device, texts):
    """The request that needs the host ends first; the one that waits starts before the others
    end."""
    engine = engine_of(on_device, texts, window_steps=4, max_running=4)
    events = watch(engine)
    waiting = generate(70, prompt(4, 70), max_tokens=3)
    requests = [*plain(3, 30), hosted("top_a", 4), waiting]
    results = drain(engine, *requests)
    assert results == run(on_device, texts, requests, window_steps=1, max_running=4, **CACHE)
    first = next(place for place, (_, ids) in enumerate(events) if 70 in ids)
    assert first < 20


def test_a_request_that_comes_waits_for_the_window_under_way_alone(on_device, texts):
    engine = engine_of(on_device, texts, window_steps=4)
    requests = [*plain(4, 60), hosted("top_a", 60)]
    for request in requests:
        engine.submit(request)
    while not engine.windows.in_flight:
        engine.step()
    engine.step()
    newcomer = generate(70, prompt(4, 70), max_tokens=3)
    engine.submit(newcomer)
    engine.step()  # takes the window in, and launches none
    engine.step()  # computes the prompt
    assert len(engine.live[70].running) == 1
    results = drain(engine)
    assert results == run(on_device, texts, [*requests, newcomer], window_steps=1, **CACHE)


def test_a_request_beside_a_window_is_cancelled(on_device, texts):
    engine = engine_of(on_device, texts, window_steps=4)
    for request in (*plain(4), hosted("beams", 30)):
        engine.submit(request)
    for _ in range(100):
        if engine.windows.in_flight and len(engine.live[HOSTED].running) == 2:
            break
        engine.step()
    engine.cancel(HOSTED)
    results = drain(engine)
    assert results.pop(HOSTED).code == "cancelled"
    assert results == run(on_device, texts, plain(4), **CACHE)
    assert_nothing_held(engine)


@pytest.mark.parametrize("spoiled_id", [0, HOSTED])
def test_scores_that_are_not_finite_end_their_request_alone(
    on_device, texts, monkeypatch, spoiled_id
):
    """In a window beside a single step, and in the single step."""
    engine = engine_of(on_device, texts, window_steps=4)
    compute, rows = on_device.logits, 8 if spoiled_id == 0 else 1  # slots of a window; a single row

    def spoiled(hidden):
        scores = compute(hidden)
        if engine.windows.in_flight and hidden.shape[0] == rows:
            scores[0] = float("nan")
        return scores

    requests = [*plain(4), hosted("top_a")]
    for request in requests:
        engine.submit(request)
    while not engine.windows.in_flight:
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(on_device, "logits", spoiled)
        results = drain(engine)
    assert results[spoiled_id].code == "not_finite"
    wanted = run(on_device, texts, requests, window_steps=1, **CACHE)
    others = [request.request_id for request in requests if request.request_id != spoiled_id]
    assert [results[i] for i in others] == [wanted[i] for i in others]
    assert_nothing_held(engine)


@pytest.mark.parametrize("where", ["first", "following", "beside"])
def test_a_step_of_a_divided_batch_that_raises(on_device, texts, monkeypatch, caplog, where):
    """A launch that raises: single steps from then on. A single step that raises: its request."""
    engine = engine_of(on_device, texts, window_steps=4)
    requests = [*plain(4), hosted("top_a")]
    wanted = run(on_device, texts, requests, window_steps=1, **CACHE)
    for request in requests:
        engine.submit(request)

    def failing(*_):
        raise RuntimeError("planted")

    while not (engine.windows.in_flight or (where == "first" and engine.scheduler.running)):
        engine.step()
    with monkeypatch.context() as patch, caplog.at_level(logging.CRITICAL):
        if where == "beside":
            patch.setattr(engine.executor, "run", failing)
        else:
            patch.setattr(DecodeWindows, "launch", failing)
        results = drain(engine)
    if where == "beside":
        assert results.pop(HOSTED).code == "internal_error"
        del wanted[HOSTED]
    assert results == wanted
    assert (engine.windows is None) == (where != "beside")
    assert_nothing_held(engine)


@pytest.mark.parametrize("device", ["host"], indirect=True)
def test_a_recorded_step_is_played_back_beside_single_steps(on_device, texts):
    requests = [*plain(5), hosted("beams")]
    engine = engine_of(on_device, texts, window_steps=3)
    tapes = Tapes(run_on_host)
    engine.windows.steps.record = tapes
    assert drain(engine, *requests) == run(on_device, texts, requests, window_steps=1, **CACHE)
    (tape,) = tapes.of_windows
    assert tape.replays >= 11
    assert any(other.replays > 2 for other in tapes.tapes if other is not tape)
    assert engine.windows is not None


@pytest.mark.parametrize("device", ["host"], indirect=True)
def test_the_shapes_that_are_held_are_bounded(on_device, texts, monkeypatch):
    """A third shape takes the place of the one that was used least recently."""
    monkeypatch.setattr(decode_steps, "SHAPES_HELD", 2)
    engine, tapes = engine_of(on_device, texts, window_steps=3), Tapes(run_on_host)
    engine.windows.steps.record = tapes
    recorded = []
    for ends in (0, 5, 0, 9, 0, 5):
        drain(engine, generate(1, prompt(9), max_tokens=4, stop_token_ids=tuple(range(ends))))
        recorded.append(len(tapes.of_windows))
        assert engine.windows.steps.shapes_held <= 2
    assert recorded == [1, 2, 2, 3, 3, 4]


def sequences(count, **given):
    """Stand-ins for running sequences."""
    job = SimpleNamespace(request=SimpleNamespace(**({"urgent": False, "adapter": None} | given)))
    sampling = generate(0).sampling
    return [SimpleNamespace(job=job, sampling=sampling, generated=[1]) for _ in range(count)]


@pytest.mark.parametrize(
    ("windowed", "single", "urgent", "most"),
    [
        (1, 0, False, 8),
        (1, 1, False, 1),
        (7, 1, False, 7),
        (99, 1, False, 8),
        (9, 4, False, 2),
        (99, 1, True, 2),
        (3, 2, True, 1),
        (3, 4, False, 0),
    ],
)
def test_a_window_is_longer_the_fewer_wait_beside_it(windowed, single, urgent, most):
    assert most_steps(windowed, sequences(single, urgent=urgent), 8) == most


def test_a_plan_is_divided_where_a_window_pays():
    able, unable = sequences(4), sequences(2, adapter="tuned")
    assert divide(StepPlan(decodes=[*unable, *able]), 8) == (able, unable)
    assert divide(StepPlan(decodes=able), 8) == (able, [])
    assert divide(StepPlan(decodes=able), 1) is None
    assert divide(StepPlan(decodes=[*able[:3], *unable]), 8) is None
    assert divide(StepPlan(decodes=unable), 8) is None
    assert divide(StepPlan(decodes=able, ranks=[RankWork(None, [], [])]), 8) is None
