"""Prefixes that left the cache come back from the host's memory: the same answers, less work."""

from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nightjar.gpu_worker.compute.model_engine import CacheMemory, build_engine
from nightjar.gpu_worker.engine import Engine, EngineConfig, RankRequest
from nightjar.gpu_worker.engine.host_tier import HostTier
from nightjar.gpu_worker.engine.kv_cache import prefix_keys
from nightjar.gpu_worker.engine.load_costs import LoadCosts
from nightjar.gpu_worker.models import Decoder, load_model
from tests.engines import assert_nothing_held, block_bytes, drain, generate, ids
from tests.unit.test_engine_prefix_cache import rows, traffic  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(any_model):
    return any_model


def engine_of(model, token_bytes, blocks, slots, **config):
    """An engine with so many blocks, and so many in the host's memory; loading always pays."""
    block = block_bytes(model)
    config |= {"kv_cache_bytes": blocks * block, "host_cache_bytes": slots * block}
    engine = Engine(model, token_bytes, EngineConfig(**config))
    if engine._tier is not None:
        engine._tier.costs = LoadCosts(1.0, 1e-12, 0.0)
        engine._tier.costs.stepped = lambda plan, seconds: None
    return engine


def assert_consistent(engine):
    """Every slot is free or has a key, nothing waits to be moved, and no block is held."""
    assert_nothing_held(engine)
    tier = engine._tier
    slots = [*tier._free, *tier._by_key.values()]
    assert sorted(slots) == list(range(tier.slots))
    assert not tier._coming


def keys_of_blocks(engine, tokens):
    """What the whole blocks of a prompt are known by."""
    pool = engine._pool
    keys = prefix_keys(tokens, pool.grain, salt=0)
    grains = pool.block_size // pool.grain
    return keys[grains - 1 :: grains]


def conversations(turns, count_=3):
    """Turns of several conversations in alternation: each prompt begins with the one before it."""
    numbers = count()
    return [
        generate(next(numbers), ids(34 + 28 * turn, seed), max_tokens=4, logprobs=2)
        for turn in range(turns)
        for seed in range(count_)
    ]


def one_by_one(engine, requests):
    found = [drain(engine, request)[request.request_id] for request in requests]
    assert all(result.outputs for result in found)
    return found


def crowd_out(engine):
    """Fill the cache with something else."""
    for number in range(-(-engine._pool.total // 3)):
        (result,) = drain(engine, generate(900 + number, ids(100, 900 + number), 1)).values()
        assert result.outputs


def test_later_turns_find_what_the_cache_has_lost(model, token_bytes, rows):  # noqa: F811
    """Texts and log-probabilities are equal to the last bit."""
    requests = conversations(4)
    wanted = one_by_one(engine_of(model, token_bytes, 1000, 0), requests)
    fewest = sum(rows)
    found = {}
    for slots in (0, 100):
        del rows[:]
        engine = engine_of(model, token_bytes, 6, slots)
        assert one_by_one(engine, requests) == wanted
        found[slots] = sum(rows)
    assert_consistent(engine)
    # The host keeps whole blocks: of 62 and of 90 known tokens not the 24 that begin the next one.
    assert found[100] == fewest + 3 * (24 + 24) < found[0]


def test_a_tier_of_one_block_changes_no_answer(model, token_bytes):
    requests = conversations(3)
    wanted = one_by_one(engine_of(model, token_bytes, 1000, 0), requests)
    engine = engine_of(model, token_bytes, 6, 1)
    assert one_by_one(engine, requests) == wanted
    assert_consistent(engine)


def test_the_memory_asked_for_is_not_exceeded(model, token_bytes):
    block = block_bytes(model)
    config = EngineConfig(kv_cache_bytes=6 * block, host_cache_bytes=4 * block - 1)
    engine = Engine(model, token_bytes, config)
    engine._tier.costs = LoadCosts(1.0, 1e-12, 0.0)
    for request in conversations(4):
        drain(engine, request)
        assert len(engine._tier) <= 3
    packed = engine._tier._transfers._memory._packed
    assert packed.numel() * packed.element_size() == 3 * block
    assert len(engine._tier) == 3


def test_memory_for_no_block_is_refused_with_the_numbers(model, token_bytes):
    block = block_bytes(model)
    with pytest.raises(ValueError, match=f"host_cache_bytes {block - 1}: one block takes {block}"):
        Engine(model, token_bytes, EngineConfig(host_cache_bytes=block - 1))


def test_no_memory_is_taken_unless_it_is_asked_for(model, token_bytes):
    assert Engine(model, token_bytes, EngineConfig())._tier is None


def test_what_computes_faster_is_not_loaded(model, token_bytes, rows):  # noqa: F811
    prompt = ids(100)
    engine = engine_of(model, token_bytes, 6, 100)
    first = drain(engine, generate(0, prompt))[0]
    crowd_out(engine)
    assert len(engine._tier) >= 3
    engine._tier.costs.loading_pays = lambda *_: False
    del rows[:]
    assert drain(engine, generate(2, prompt))[2].outputs == first.outputs
    assert rows[0] == 100


def test_a_reset_forgets_the_hosts_memory_too(model, token_bytes, rows):  # noqa: F811
    engine = engine_of(model, token_bytes, 6, 100)
    for seed in range(3):
        drain(engine, generate(seed, ids(100, seed)))
    assert len(engine._tier) > 0
    engine.reset_prefix_cache()
    assert len(engine._tier) == 0
    del rows[:]
    drain(engine, generate(9, ids(100, 0)))
    assert rows[0] == 100
    assert_consistent(engine)


def test_requests_that_come_together_share_what_is_loaded(model, token_bytes, rows):  # noqa: F811
    """The second finds the blocks that are still on their way, in the same step."""
    system = ids(64)
    engine = engine_of(model, token_bytes, 12, 100)
    drain(engine, generate(0, system + ids(5, 1)))
    crowd_out(engine)
    del rows[:]
    requests = [generate(i, system + ids(5, i), max_tokens=2) for i in (2, 3)]
    found = drain(engine, *requests)
    assert rows == [10, 2]
    assert found == drain(engine_of(model, token_bytes, 100, 0), *requests)


def test_a_request_cancelled_while_its_prefix_is_loaded_leaves_nothing(model, token_bytes):
    """Its rows do not fit into the step it is opened in, so no layer is waited for."""
    engine = engine_of(model, token_bytes, 12, 100, max_step_tokens=16)
    prompt = ids(100)
    wanted = drain(engine, generate(0, prompt))[0]
    crowd_out(engine)
    engine.submit(generate(2, prompt))
    loading = []
    load = engine._tier._transfers.load
    engine._tier._transfers.load = lambda pairs: loading.append(pairs) or load(pairs)
    while not loading:
        engine.step()
    engine.cancel(2)
    assert drain(engine)[2].code == "cancelled"
    assert_consistent(engine)
    assert drain(engine, generate(3, prompt))[3].outputs == wanted.outputs


def test_a_load_that_no_step_waited_for_is_over_before_its_blocks_are_used(
    model, token_bytes, monkeypatch
):
    """The step that loads fails before the first layer; its blocks go to another request."""
    engine = engine_of(model, token_bytes, 6, 100)
    drain(engine, generate(0, ids(100)))
    crowd_out(engine)
    forward = Decoder.forward

    def fails(*_):
        raise RuntimeError("no forward pass today")

    monkeypatch.setattr(Decoder, "forward", fails)
    assert drain(engine, generate(2, ids(100)))[2].code == "internal_error"
    assert engine._tier._transfers._loading is not None
    monkeypatch.setattr(Decoder, "forward", forward)
    other = generate(3, ids(115, 7))
    alone = drain(engine_of(model, token_bytes, 100, 0), other)
    assert drain(engine, other) == alone
    assert_consistent(engine)


def test_what_is_not_finite_never_gets_there(model, token_bytes, monkeypatch):
    engine = engine_of(model, token_bytes, 6, 100)
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, x: logits(self, x) * float("nan"))
    assert drain(engine, generate(0, ids(100)))[0].code == "not_finite"
    monkeypatch.setattr(Decoder, "logits", logits)
    crowd_out(engine)
    assert len(engine._tier) > 0
    keys = keys_of_blocks(engine, ids(100))
    assert len(keys) == 3
    assert not any(key in engine._tier for key in keys)


def test_a_prefix_that_is_spoiled_is_forgotten_by_the_host_too(model, token_bytes, monkeypatch):
    """It was saved when its request ended well; then one that shares it is not finite."""
    engine = engine_of(model, token_bytes, 6, 100)
    drain(engine, generate(0, ids(100)))
    crowd_out(engine)
    keys = set(engine._tier._by_key)
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, x: logits(self, x) * float("nan"))
    assert drain(engine, generate(2, ids(100)))[2].code == "not_finite"
    assert len(keys & set(engine._tier._by_key)) == len(keys) - 3


def test_rankings_load_their_queries(model, token_bytes, rows):  # noqa: F811
    query = ids(100)
    engine = engine_of(model, token_bytes, 6, 100)
    wanted = drain(engine, RankRequest(0, query, [ids(5, 1), ids(6, 2)]))[0]
    crowd_out(engine)
    del rows[:]
    found = drain(engine, RankRequest(2, query, [ids(5, 1), ids(6, 2)]))[2]
    assert rows[0] < 4 + 5 + 4 + 5
    assert found.mean_nll == wanted.mean_nll


def test_the_engine_times_prompts_and_transfers(model, token_bytes):
    block = block_bytes(model)
    config = EngineConfig(kv_cache_bytes=6 * block, host_cache_bytes=100 * block)
    engine = Engine(model, token_bytes, config)
    costs = engine._tier.costs
    for seed in range(3):
        drain(engine, generate(seed, ids(100, seed), max_tokens=2))
    assert len(costs._token_s._found) == 1 + 3
    assert len(costs._byte_s._found) > 1
    assert all(value > 0 for value in (*costs._token_s._found, *costs._byte_s._found))


@settings(max_examples=25, deadline=None)
@given(traffic=traffic(), slots=st.sampled_from([1, 5, 200]))
def test_no_bit_depends_on_what_was_loaded_and_no_block_leaks(model, token_bytes, traffic, slots):
    waves, config, blocks = traffic
    engine = engine_of(model, token_bytes, blocks, slots, **config)
    for wave in waves:
        results = drain(engine, *wave)
        assert_consistent(engine)
        for request in wave:
            alone = drain(Engine(model, token_bytes, EngineConfig()), request)
            assert results[request.request_id] == alone[request.request_id]


def test_every_layer_is_waited_for_before_it_is_read(model, token_bytes):
    """Blocks under way are poisoned: what is read too early would show."""
    engine = engine_of(model, token_bytes, 6, 100)
    wanted = drain(engine, generate(0, ids(100)))[0]
    crowd_out(engine)
    load, seen = engine._tier._transfers.load, []

    def poisoned(pairs):
        blocks = [block for block, _ in pairs]
        engine._cache.keys[:, blocks] = torch.nan
        engine._cache.values[:, blocks] = torch.nan
        arrivals = load(pairs)
        seen.append(arrivals._done)
        return arrivals

    engine._tier._transfers.load = poisoned
    assert drain(engine, generate(2, ids(100)))[2].outputs == wanted.outputs
    assert seen == [0]


class Recorded:
    """Transfers that only say what was asked of them."""

    def __init__(self):
        self.saved, self.loaded, self.awaited = [], [], []

    def save(self, pairs, *, rested):
        self.saved.append(list(pairs))

    def load(self, pairs):
        self.loaded.append(list(pairs))

    def await_saved(self, blocks):
        self.awaited.append(list(blocks))

    def finish_load(self):
        pass


def tier_of(slots):
    return HostTier(Recorded(), slots, 100, 4, LoadCosts(1.0, 1e-12, 0.0))


def evict(tier, *pairs):
    """Blocks and keys, in one step."""
    for block, key in pairs:
        tier.evicted(block, key)
    tier.before_writes()
    tier.start_loads()


def test_the_least_recently_used_prefix_goes_first():
    tier = tier_of(2)
    evict(tier, (0, b"a"))
    evict(tier, (1, b"b"))
    tier.claim([b"a"])
    tier.start_loads()
    evict(tier, (2, b"c"))
    assert list(tier._by_key) == [b"a", b"c"]


def test_the_end_of_a_prefix_goes_before_its_beginning():
    tier = tier_of(3)
    evict(tier, (0, b"1"), (1, b"2"), (2, b"3"))
    tier.claim([b"1", b"2", b"3"])
    tier.start_loads()
    evict(tier, (3, b"x"))
    assert [key in tier for key in (b"1", b"2", b"3")] == [True, True, False]


def test_what_is_there_already_is_not_saved_again():
    tier = tier_of(8)
    evict(tier, (0, b"a"))
    evict(tier, (5, b"a"))
    assert tier._transfers.saved == [[(0, 7)]]
    assert tier._transfers.awaited[-1] == [5]  # it may still be leaving


def test_slots_that_a_planned_step_reads_or_writes_are_not_given_away():
    tier = tier_of(2)
    evict(tier, (0, b"a"), (1, b"b"))
    slots = tier.claim([b"a", b"b"])
    tier.evicted(2, b"c")
    tier.load([7, 8], slots)
    tier.before_writes()
    tier.start_loads()
    tier.save_early([(3, b"d")])
    assert b"c" not in tier
    assert tier._transfers.loaded == [[(7, slots[0]), (8, slots[1])]]
    evict(tier, (4, b"e"))  # the load is over when the next step begins to write
    evict(tier, (4, b"f"))
    assert b"f" in tier


def test_two_blocks_never_leave_for_one_slot_in_one_step():
    tier = tier_of(1)
    evict(tier, (0, b"a"), (1, b"b"))
    assert tier._transfers.saved == [[(0, 0)]]
    tier.evicted(2, b"c")
    tier.spoiled(b"c")
    tier.evicted(3, b"d")
    tier.before_writes()
    assert len({slot for _, slot in tier._transfers.saved[-1]}) == len(tier._transfers.saved[-1])


def test_only_a_beginning_without_a_gap_is_loaded():
    tier = tier_of(8)
    evict(tier, (0, b"1"), (1, b"3"))
    assert tier.worth_loading([b"1", b"2", b"3"]) == [b"1"]
    assert tier.worth_loading([b"2", b"3"]) == ()


def test_a_miss_looks_once_and_asks_for_no_price(monkeypatch):
    tier = tier_of(8)
    monkeypatch.setattr(LoadCosts, "loading_pays", lambda *_: pytest.fail("asked"))
    looked = []

    class Counted(dict):
        def __contains__(self, key):
            looked.append(key)
            return super().__contains__(key)

    tier._by_key = Counted()
    assert not tier.worth_loading([b"1", b"2", b"3"])
    assert looked == [b"1"]


def test_what_is_queued_before_counts_in_the_price():
    tier = tier_of(8)
    tier.costs = LoadCosts(1.0, 1.5 / 100, 0.0)  # 1.5 s for a block, 4 s to compute one
    evict(tier, (0, b"a"), (1, b"b"), (2, b"c"))
    for key, block in ((b"a", 5), (b"b", 6)):
        assert tier.worth_loading([key])
        tier.load([block], tier.claim([key]))
    assert not tier.worth_loading([b"c"])


def test_saving_ahead_takes_a_quarter_and_comes_to_rest():
    tier = tier_of(8)
    blocks = [(block, bytes([block])) for block in range(6)]
    for _ in range(3):
        tier.before_writes()
        tier.start_loads()
        tier.save_early(blocks)
    assert tier._transfers.saved == [[(0, 7), (1, 6)]]


def test_blocks_are_saved_before_their_turn_has_come(model, token_bytes):
    """In the step before the one that needs their room."""
    engine = engine_of(model, token_bytes, 6, 100)
    drain(engine, generate(0, ids(100)))
    assert len(engine._tier) == 0
    drain(engine, generate(1, ids(40, 1), max_tokens=1))
    assert len(engine._tier) == 3
    assert engine._pool.find(keys_of_blocks(engine, ids(100)))


def test_a_model_in_several_processes_has_none(model, token_bytes, monkeypatch, caplog):
    monkeypatch.setattr(Decoder, "in_lockstep", True)
    engine = Engine(model, token_bytes, EngineConfig(host_cache_bytes=1 << 20))
    assert engine._tier is None
    assert "host_cache_bytes has no effect" in caplog.text


def test_the_compute_process_gives_its_engine_the_memory(directory):
    def load(dtype):
        return load_model(directory, dtype)

    bytes_ = 5 * block_bytes(load("fp32"))
    engine = build_engine(
        directory, directory.tokenizer(), "fp32", load, memory=CacheMemory(host_bytes=bytes_)
    )
    assert engine._tier.slots == 5
