"""The state on the device equals the host's own state of the sequences."""

import torch

from nightjar.gpu_worker.engine.device_state import shape_of, slots_for
from nightjar.gpu_worker.engine.windows import DecodeWindows
from nightjar.gpu_worker.models.decode_state import Shape, token_texts
from nightjar.gpu_worker.models.decode_steps import DecodeSteps
from nightjar.kernels import Column, Reason
from tests.engine_cuda.requests import engine_of, prompt
from tests.engines import generate


def flying(model, texts, *requests, windows=1, **config):
    """An engine with `windows` windows under way, and the tensors of its batch."""
    engine = engine_of(model, texts, **config)
    for request in requests:
        engine.submit(request)
    while not engine.windows.in_flight:
        assert engine.has_work  # else the requests have failed
        engine.step()
    for _ in range(windows - 1):
        engine.windows.follow(crowded=False)
    return engine, engine.windows.steps.batch


def test_tables_on_the_device_are_those_of_the_texts_in_every_window(on_device, texts):
    """The second window reaches into a block that the first did not need."""
    engine, batch = flying(
        on_device, texts, generate(1, prompt(27), max_tokens=12), windows=2, window_steps=4
    )
    (sequence,) = engine.scheduler.running
    blocks = sequence.table.blocks
    assert len(blocks) == 2
    assert batch.state.block_tables[0, :2].tolist() == blocks


def test_a_text_begins_on_the_device_where_the_host_has_it(on_device, texts, monkeypatch):
    launched = []
    monkeypatch.setattr(DecodeSteps, "launch", lambda one, steps: launched.append(steps))
    monkeypatch.setattr(DecodeWindows, "in_flight", property(lambda windows: bool(launched)))
    stops = (b"\xf0abc", b"zz")
    asked = generate(
        1, prompt(40), max_tokens=9, stop=stops, stop_token_ids=(7, 8), repetition_penalty=1.5
    )
    engine, batch = flying(on_device, texts, asked, generate(2, prompt(3, 2), max_tokens=5))
    first, second = engine.scheduler.running
    row = batch.state.rows[0]
    assert row[Column.LENGTH] == 41
    assert row[Column.GENERATED] == 1
    assert row[Column.STATE] == first.matcher.state
    assert row[Column.TEXT_BYTES] == first.matcher.length == len(first.pieces[0])
    assert batch.state.rows[:, Column.REASON].tolist() == [0, 0, *[Reason.MAX_LENGTH] * 6]
    assert batch.state.rows[:2, Column.AUTOMATON].tolist() == [0, -1]
    assert sorted(batch.state.ends[0].tolist()) == [-1, -1, 7, 8]
    newest = first.generated[-1], 40, first.table.blocks[1], 8
    assert tuple(batch.state.inputs[:, 0].tolist()) == newest
    assert batch.state.inputs[2, 2:].tolist() == [-1] * 6
    assert batch.state.attention_lengths.tolist() == [41, 4, *[0] * 6]
    seen = {t for t in range(320) if batch.state.seen[0, t // 32] >> t % 32 & 1}
    assert seen == {*prompt(40), *first.generated}
    assert batch.state.counts[0].nonzero().squeeze(1).tolist() == first.generated
    assert batch.penalties.repetition[:2].tolist() == [1.5, 1.0]
    assert second.length == 4


def test_few_shapes_serve_all_batches(on_device, texts):
    counts = (1, 8, 9, 33, 64, 65, 129, 200, 256, 264)
    assert [slots_for(n) for n in counts] == [8, 8, 16, 40, 64, 80, 144, 208, 256, 272]
    assert len({slots_for(n) for n in range(1, 265)}) == 21
    engine, _ = flying(on_device, texts, generate(1, prompt(5), max_tokens=100), window_steps=2)
    assert shape_of(engine.scheduler.running, 32) == Shape(slots=8, width=4, ends=4, states=64)


def test_the_texts_of_tokens_lie_one_after_another():
    found = token_texts([b"ab", b"", b"c"], "cpu")
    assert bytes(found.data.tolist()) == b"abc"
    assert found.starts.tolist() == [0, 2, 2, 3]
    assert token_texts([b"", b""], "cpu").starts.tolist() == [0, 0, 0]
    assert found.starts.dtype == torch.int32
