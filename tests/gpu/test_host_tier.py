"""The host tier of an engine: the same answers, on a GPU with pinned memory and streams."""

import gc

import pytest
import torch

from nightjar.gpu_worker.engine import Engine, EngineConfig
from nightjar.gpu_worker.engine.load_costs import LoadCosts
from nightjar.gpu_worker.engine.transfers import DirectTransfers, HostMemory, StreamTransfers
from nightjar.gpu_worker.models import KVTensors, load_model
from tests.engines import assert_nothing_held, drain, generate, ids, load_always

BLOCKS = 3
"""Cache blocks that the longest request needs."""

SLOTS = 50


def engine_of(model, tokenizer, blocks, slots):
    """An engine that loads whatever it can."""
    block = KVTensors.block_bytes(model.config, 32, model.cache_dtype)
    config = EngineConfig(kv_cache_bytes=blocks * block, host_cache_bytes=slots * block)
    engine = Engine(model, tokenizer.token_bytes, config)
    if slots:
        load_always(engine)
    return engine


def turns():
    """Four conversations in alternation, three turns each."""
    vocab = 300
    return [
        generate(4 * turn + seed, [t % vocab for t in ids(34 + 28 * turn, seed)], max_tokens=6)
        for turn in range(3)
        for seed in range(4)
    ]


def test_turns_that_come_back_from_the_hosts_memory_are_the_same(llama, llama_model, engine_device):
    """The loaded bits are those that were computed.

    One by one, so that both engines compute steps of the same requests.
    """
    tokenizer = llama.tokenizer()
    tight = engine_of(llama_model, tokenizer, BLOCKS, SLOTS)
    kind = StreamTransfers if engine_device == "cuda" else DirectTransfers
    assert isinstance(tight.tier.transfers, kind)
    loaded, load = [], tight.tier.transfers.load
    tight.tier.transfers.load = lambda pairs: loaded.extend(pairs) or load(pairs)
    roomy = engine_of(llama_model, tokenizer, 1000, 0)
    for turn in turns():
        assert drain(tight, turn) == drain(roomy, turn)
    assert_nothing_held(tight)
    # Each second and third turn finds a whole block of the turn before.
    assert len(loaded) == 4 + 4


def test_the_bits_of_a_block_come_back(llama_model, engine_device):
    """Through slots, out of order, layer by layer."""
    cache = llama_model.allocate_cache(8, 32)
    cache.keys.normal_()
    cache.values.normal_()
    before = [x.clone() for x in (cache.keys, cache.values)]
    kind = StreamTransfers if engine_device == "cuda" else DirectTransfers
    moved = kind(cache, 4, lambda *_: None)
    moved.save([(5, 3), (2, 0)], rested=False)
    moved.await_saved([5, 2])
    cache.clear([5, 2])
    arrivals = moved.load([(0, 3), (7, 0)])
    for layer in range(cache.keys.shape[0]):
        arrivals.wait(layer)
        for now, old in zip((cache.keys, cache.values), before, strict=True):
            assert torch.equal(now[layer, [0, 7]], old[layer, [5, 2]])
    assert not cache.keys[:, [5, 2]].any()


@pytest.mark.gpu
def test_the_memory_is_pinned_to_the_byte_and_let_go(llama):
    cache = load_model(llama, "fp16", "cuda").allocate_cache(2, 32)
    memory = HostMemory(cache, 5)
    (packed,) = memory.packed
    assert packed.is_pinned()
    assert packed[:, :1].is_pinned()
    assert packed.numel() * packed.element_size() == 5 * memory.block_bytes
    del memory
    gc.collect()
    assert not packed.is_pinned()


@pytest.mark.gpu
def test_transfers_are_timed_on_the_device(llama, monkeypatch):
    found = []
    monkeypatch.setattr(
        LoadCosts, "moved", lambda costs, bytes_, seconds: found.append(bytes_ / seconds)
    )
    engine = engine_of(load_model(llama, "fp16", "cuda"), llama.tokenizer(), BLOCKS, SLOTS)
    for turn in turns():
        drain(engine, turn)
    assert found
    assert all(0 < speed < 1e12 for speed in found)
