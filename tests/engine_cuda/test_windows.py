"""Windows of decode steps on the device: the same tokens as one step at a time."""

import logging

import pytest
import torch

from nightjar.gpu_worker.engine import loop
from nightjar.gpu_worker.engine.window_policy import window_length
from nightjar.gpu_worker.engine.windows import DecodeWindows
from nightjar.gpu_worker.models import KVTensors, load_model
from tests.engine_cuda.requests import CACHE, engine_of, prompt, tokens
from tests.engines import assert_nothing_held, drain, generate, run


def in_windows(model, texts, requests, **config):
    """The results of an engine that launches more than one step at a time."""
    engine = engine_of(model, texts, **config)
    windows, steps = engine.windows, []
    results = drain(engine, *requests, after_step=lambda: steps.extend(windows.steps_under_way))
    assert engine.windows is windows  # else launching has failed
    assert max(steps) > 1
    assert_nothing_held(engine)
    return results


def mixed_requests():
    """Requests: greedy and sampled, short and long, with penalties and with several samples."""
    return [
        generate(1, prompt(27, 1), max_tokens=9),  # into a cache block of a later window
        generate(2, prompt(34, 2), max_tokens=5, temperature=0.9, seed=4, top_k=30),
        generate(3, prompt(9, 3), max_tokens=7, temperature=1.1, seed=-5, top_p=0.9, min_p=0.01),
        generate(4, prompt(30, 4), max_tokens=8, repetition_penalty=1.4, frequency_penalty=0.3),
        generate(5, prompt(6, 5), max_tokens=6, presence_penalty=0.7, n=2, temperature=0.7, seed=2),
        generate(6, prompt(6, 6), max_tokens=1),
    ]


def test_windows_write_what_single_steps_and_the_cpu_write(on_device, by_cpu, texts):
    requests = mixed_requests()
    windows = in_windows(on_device, texts, requests, window_steps=4)
    single = run(on_device, texts, requests, window_steps=1, **CACHE)
    assert windows == single
    assert tokens(windows) == tokens(by_cpu(requests))


def test_texts_end_where_the_cpu_ends_them(on_device, by_cpu, texts):
    """Stop strings inside a token and over two, end tokens, a stop before `min_tokens`.

    The sequences end at different steps of a window.
    """
    free = by_cpu([generate(1, prompt(12, 7), max_tokens=14)])[1]
    pieces = [texts[token] for token in free.token_ids]
    assert all(pieces[:9])
    inside = pieces[3][:1]
    across = pieces[5][-1:] + pieces[6][:1]
    begun = pieces[0][-1:] + pieces[1][:1]  # before the text comes to the device
    requests = [
        generate(1, prompt(12, 7), max_tokens=14, stop=(inside,)),
        generate(2, prompt(12, 7), max_tokens=14, stop=(across, b"\xff\xff")),
        generate(3, prompt(12, 7), max_tokens=14, stop_token_ids=(free.token_ids[4],)),
        generate(4, prompt(12, 7), max_tokens=14, stop=(inside,), min_tokens=2),
        generate(5, prompt(12, 7), max_tokens=14),
        generate(6, prompt(12, 7), max_tokens=14, stop=(begun,)),
    ]
    wanted = by_cpu(requests)
    assert {r.finish_reason for r in wanted.values()} == {"stop", "length"}
    got = in_windows(on_device, texts, requests, window_steps=4)
    for number, result in wanted.items():
        assert got[number].outputs == result.outputs


def test_a_text_is_the_same_in_any_company(on_device, texts):
    """Alone, in a batch, and with few slots, so that others join when some end."""
    requests = mixed_requests()
    together = in_windows(on_device, texts, requests, window_steps=3)
    for asked in requests[1:4:2]:
        (alone,) = run(on_device, texts, [asked], window_steps=3, **CACHE).values()
        assert alone == together[asked.request_id]
    crowded = in_windows(on_device, texts, requests, window_steps=3, max_running=2)
    assert crowded == together


def test_a_request_that_comes_while_a_window_flies_joins_and_changes_nothing(on_device, texts):
    first, second = mixed_requests()[:2]
    wanted = run(on_device, texts, [first], **CACHE) | run(on_device, texts, [second], **CACHE)
    engine = engine_of(on_device, texts, window_steps=2)
    engine.submit(first)
    while not engine.windows.in_flight:
        assert engine.step() == []
    assert drain(engine, second) == wanted
    assert_nothing_held(engine)


def test_a_cancelled_text_leaves_and_its_neighbour_goes_on(on_device, texts):
    first, second = (generate(i, prompt(3, i), max_tokens=12) for i in (1, 2))
    wanted = run(on_device, texts, [second], **CACHE)[2]
    engine = engine_of(on_device, texts, window_steps=2)
    engine.submit(first)
    engine.submit(second)
    while not engine.windows.in_flight:
        assert engine.step() == []
    engine.cancel(1)
    results = drain(engine)
    assert results[1].code == "cancelled"
    assert results[2] == wanted
    assert_nothing_held(engine)


def test_scores_that_are_not_finite_end_their_request_alone(on_device, texts, monkeypatch):
    """A NaN in one row's hidden state, in the middle of a window."""
    engine = engine_of(on_device, texts, window_steps=4)
    plain, seen = on_device.logits, []

    def spoiled(hidden):
        scores = plain(hidden)
        if engine.windows.in_flight or hidden.shape[0] == 8:  # a step of a window: 8 places
            seen.append(hidden.shape[0])
            if len(seen) == 3:
                scores[0] = float("nan")
        return scores

    monkeypatch.setattr(on_device, "logits", spoiled)
    requests = [generate(1, prompt(3, 1), max_tokens=9), generate(2, prompt(4, 2), max_tokens=9)]
    results = drain(engine, *requests)
    assert results[1].code == "not_finite"
    monkeypatch.setattr(on_device, "logits", plain)
    assert results[2] == run(on_device, texts, requests[1:], **CACHE)[2]
    assert_nothing_held(engine)


def test_a_window_is_launched_before_the_one_before_it_is_taken_in(on_device, texts):
    engine = engine_of(on_device, texts, window_steps=2)
    engine.submit(generate(1, prompt(3, 1), max_tokens=9))
    flying = []
    while engine.has_work:
        engine.step()
        flying.append(len(engine.windows.steps_under_way))
    # Prompt; launch; then one is taken in behind another that is under way, up to the last.
    assert flying == [0, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("flying", [False, True], ids=["first", "following"])
def test_a_window_that_cannot_be_launched(on_device, texts, monkeypatch, flying):
    """The engine goes on step by step; if the device has failed, the step raises."""

    def failing(*_):
        raise RuntimeError("planted")

    request = generate(1, prompt(3, 1), max_tokens=9)
    wanted = run(on_device, texts, [request], window_steps=2, **CACHE)
    for works in (True, False):
        engine = engine_of(on_device, texts, window_steps=2)
        engine.submit(request)
        while engine.windows.in_flight != flying:
            engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(DecodeWindows, "launch", failing)
            if works:
                assert drain(engine) == wanted
                assert engine.windows is None
                continue
            patch.setattr(loop, "require_working", failing)
            with pytest.raises(RuntimeError, match="planted"):
                drain(engine)


@pytest.mark.parametrize(
    ("left", "crowded", "steps"),
    [
        ([5, 3], False, 5),
        ([50, 3], False, 8),
        ([0, 0], False, 0),
        ([0, 0], True, 0),
        ([5, 3], True, 4),
        ([9, 9], True, 8),
        ([1, *[20] * 7], True, 8),  # 7 steps of 64
        ([1, 1, *[20] * 6], True, 2),  # 2 of 16, but 4 of 24
        ([1, 2, 3, 4, *[20] * 28], True, 8),  # 22 of 256
        ([0, *[20] * 6], True, 0),  # a seventh from the first step on
        ([0, *[20] * 7], True, 8),
    ],
)
def test_a_window_is_as_long_as_few_places_have_nothing_to_do(left, crowded, steps):
    assert window_length(left, 8, crowded=crowded) == steps


@pytest.mark.parametrize("steps", [2, 16])
def test_any_length_of_a_window_gives_the_same_texts(on_device, by_cpu, texts, steps):
    requests = mixed_requests()[1:3]
    got = in_windows(on_device, texts, requests, window_steps=steps)
    assert tokens(got) == tokens(by_cpu(requests))


@pytest.mark.gpu
def test_graphs_change_nothing(gpt, texts):
    model = load_model(gpt, "fp16", "cuda")
    found = [
        run(model, texts, mixed_requests(), cuda_graphs=graphs, **CACHE) for graphs in (True, False)
    ]
    assert found[0] == found[1]


@pytest.mark.gpu
def test_the_host_waits_for_nothing_until_it_takes_a_window_in(gpt, texts, caplog):
    """Tainted blocks that a window draws are cleared behind the window under way.

    Where torch would wait for the device, it raises here.
    """
    engine = engine_of(load_model(gpt, "fp16", "cuda"), texts, window_steps=2)
    engine.pool.taint(range(12))
    follow, cleared, clear = engine.windows.follow, [], KVTensors.clear

    def strict(**given):
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return follow(**given)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def counted(cache, blocks):
        cleared.extend(blocks if torch.cuda.get_sync_debug_mode() else [])
        clear(cache, blocks)

    engine.windows.follow = strict
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(KVTensors, "clear", counted)
        results = drain(engine, *(generate(i, prompt(27, i), max_tokens=12) for i in (1, 2, 3)))
    assert len(results) == 3
    assert cleared
    assert engine.windows is not None
    assert [record.getMessage() for record in caplog.records] == []
