"""Transfers on streams: here on streams that do everything as late as they may."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nightjar.gpu_worker.engine import Engine, EngineConfig, transfers, upkeep
from nightjar.gpu_worker.engine.transfers import DirectTransfers, HostMemory, StreamTransfers
from nightjar.gpu_worker.models import KVTensors
from tests.engines import block_bytes, drain, generate, ids
from tests.host_tiers import assert_consistent, engine_of
from tests.lazy_streams import Stream, Streams
from tests.traffic import conversations, one_by_one, traffic

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(any_model):
    return any_model


def lazily(patch, seed=0):
    """Let engines that are made from now on use streams, as if their caches were on a GPU."""
    streams = Streams(seed)
    patch.setattr(transfers, "torch", SimpleNamespace(**vars(torch) | {"cuda": streams}))
    patch.setattr(upkeep, "transfers", StreamTransfers)

    def queued(move):
        def put(memory, *args):
            assert streams.now is not streams.main
            streams.now.put(lambda: move(memory, *args))

        return put

    for name in ("save", "load_layer"):
        patch.setattr(HostMemory, name, queued(getattr(HostMemory, name)))
    return streams


def caches(blocks=6, layers=3):
    generator = torch.Generator().manual_seed(0)
    shape = (layers, blocks, 2, 4, 8)
    return KVTensors(*(torch.randn(shape, generator=generator) for _ in range(2)))


@pytest.fixture
def saved(monkeypatch):
    """A cache, a copy of it, and transfers on lazy streams that save block 0 to their one slot."""
    lazily(monkeypatch)
    cache, before = caches(), caches()
    moved = StreamTransfers(cache, 1, lambda *_: None)
    moved.save([(0, 0)], rested=False)
    return cache, before, moved


def test_blocks_are_copied_before_they_are_overwritten(monkeypatch):
    lazily(monkeypatch)
    cache, before = caches(), caches()
    moved = StreamTransfers(cache, 4, lambda *_: None)
    moved.save([(2, 0), (5, 3)], rested=False)
    assert not moved.memory.packed[0][0].equal(before.keys[:, 2])
    moved.await_saved([2, 5])
    cache.clear([2, 5])
    moved.load([(1, 0), (0, 3)]).wait(-1)
    assert torch.equal(cache.keys[:, [1, 0]], before.keys[:, [2, 5]])
    assert torch.equal(cache.values[:, [1, 0]], before.values[:, [2, 5]])


def test_a_layer_comes_when_it_is_waited_for_and_not_the_next(saved):
    cache, before, moved = saved
    arrivals = moved.load([(4, 0)])
    for layer in range(3):
        assert torch.equal(cache.keys[layer:, 4], before.keys[layer:, 4])
        arrivals.wait(layer)
        assert torch.equal(cache.keys[: layer + 1, 4], before.keys[: layer + 1, 0])


def test_a_load_that_was_not_waited_for_is_over_when_it_is_finished(saved):
    cache, before, moved = saved
    moved.load([(4, 0)])
    moved.finish_load()
    assert torch.equal(cache.keys[:, 4], before.keys[:, 0])


def test_a_slot_is_read_before_it_is_written_again(saved):
    """A load on one stream, the next save into its slot on the other."""
    cache, before, moved = saved
    moved.load([(4, 0)])
    moved.save([(1, 0)], rested=False)
    moved.await_saved([1])
    moved.finish_load()
    assert torch.equal(cache.keys[:, 4], before.keys[:, 0])


def test_both_directions_are_timed(monkeypatch):
    streams = lazily(monkeypatch)
    monkeypatch.setattr(streams.whim, "random", lambda: 0.0)
    seen = []
    cache = caches()
    moved = StreamTransfers(cache, 2, lambda bytes_, seconds: seen.append((bytes_, seconds)))
    moved.save([(0, 0), (1, 1)], rested=False)
    moved.load([(4, 0)])
    moved.finish_load()
    block = 2 * 3 * 2 * 4 * 8 * 4
    assert seen == [(2 * block, 1e-3), (block, 1e-3)]


def test_transfers_without_streams_are_timed_as_well():
    seen = []
    direct = DirectTransfers(caches(), 2, lambda *found: seen.append(found))
    direct.save([(0, 0), (1, 1)], rested=False)
    direct.load([(4, 0)])
    direct.finish_load()
    block = 2 * 3 * 2 * 4 * 8 * 4
    assert [bytes_ for bytes_, _ in seen] == [2 * block, block]
    assert all(seconds > 0 for _, seconds in seen)


def test_conversations_are_the_same_on_lazy_streams(model, token_bytes, monkeypatch):
    requests = conversations(4)
    wanted = one_by_one(engine_of(model, token_bytes, 1000, 0), requests)
    lazily(monkeypatch)
    engine = engine_of(model, token_bytes, 6, 100)
    assert isinstance(engine.tier.transfers, StreamTransfers)
    assert one_by_one(engine, requests) == wanted
    assert_consistent(engine)


@settings(max_examples=25, deadline=None)
@given(traffic=traffic(), slots=st.sampled_from([1, 5, 200]), seed=st.integers(0, 99))
def test_no_bit_depends_on_when_streams_do_their_work(model, token_bytes, traffic, slots, seed):
    waves, config, blocks = traffic
    with pytest.MonkeyPatch.context() as patch:
        lazily(patch, seed)
        engine = engine_of(model, token_bytes, blocks, slots, **config)
        for wave in waves:
            results = drain(engine, *wave)
            assert_consistent(engine)
            for request in wave:
                alone = drain(Engine(model, token_bytes, EngineConfig()), request)
                assert results[request.request_id] == alone[request.request_id]


class NoArrivals:
    """A load that nobody waits for."""

    def wait(self, layer):
        pass


@pytest.mark.parametrize("lost", ["await_saved", "load"])
def test_a_wait_that_is_missing_shows(model, token_bytes, monkeypatch, lost):
    """Without these failures the tests above would show nothing."""
    lazily(monkeypatch)
    load = StreamTransfers.load

    def hasty(moved, pairs):
        load(moved, pairs)
        return NoArrivals()

    instead = {"await_saved": lambda *_: None, "load": hasty}
    monkeypatch.setattr(StreamTransfers, lost, instead[lost])
    block = block_bytes(model)
    roomy = Engine(model, token_bytes, EngineConfig(kv_cache_bytes=1000 * block))
    engine = engine_of(model, token_bytes, 6, 100)
    requests = [generate(i, ids(100, i % 3), max_tokens=4, logprobs=1) for i in range(9)]
    assert one_by_one(engine, requests) != one_by_one(roomy, requests)


def test_the_stand_in_runs_work_late_and_in_order():
    streams, seen = Streams(0), []
    first, second = streams.Stream(), streams.Stream()
    first.put(lambda: seen.append(1))
    second.wait_stream(first)
    second.put(lambda: seen.append(2))
    event = streams.Event()
    event.record(second)
    second.put(lambda: seen.append(3))
    assert seen == []
    Stream.wait_event(streams.main, event)
    assert seen == [1, 2]


def test_what_rested_is_saved_beside_the_step_and_not_after_it(monkeypatch):
    streams = lazily(monkeypatch)
    waited = []
    monkeypatch.setattr(Stream, "wait_stream", lambda stream, other: waited.append(other))
    moved = StreamTransfers(caches(), 2, lambda *_: None)
    moved.finish_load()
    moved.save([(0, 0)], rested=True)
    assert waited == []
    moved.save([(1, 1)], rested=False)
    assert waited == [streams.main]


def test_memory_is_unlocked_when_the_device_has_done_all_that_it_was_asked_for(monkeypatch):
    """A copy may be under way when an engine is dropped."""
    done, block = [], (2, 4, 8)
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: done.append("lock") or 0,
        cudaHostUnregister=lambda _: done.append("unlock"),
    )
    cuda = SimpleNamespace(
        cudart=lambda: runtime, synchronize=lambda device: done.append(f"wait for {device}")
    )
    monkeypatch.setattr(transfers, "torch", SimpleNamespace(**vars(torch) | {"cuda": cuda}))
    keys = SimpleNamespace(shape=(3, 6, *block), dtype=torch.float16, is_cuda=True, device="cuda:0")
    memory = HostMemory(SimpleNamespace(keys=keys, pairs=((keys, keys),)), 2)
    assert done == ["lock"]
    del memory
    assert done == ["lock", "wait for cuda:0", "unlock"]
