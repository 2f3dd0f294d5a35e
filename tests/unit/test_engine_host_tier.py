"""Prefixes that left the cache are loaded from the host tier: the same answers, less work."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.compute.model_engine import build_engine
from nightjar.gpu_worker.engine import Engine, EngineConfig, RankRequest
from nightjar.gpu_worker.engine.host_tier import HostTier
from nightjar.gpu_worker.engine.kv_cache import prefix_keys
from nightjar.gpu_worker.engine.load_costs import LoadCosts
from nightjar.gpu_worker.models import Decoder, load_model
from tests.engines import block_bytes, drain, generate, ids, load_always
from tests.host_tiers import assert_consistent, engine_of
from tests.traffic import conversations, one_by_one, traffic

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(any_model):
    return any_model


def keys_of_blocks(engine, tokens):
    """The keys of the whole blocks of a prompt."""
    pool = engine.pool
    keys = prefix_keys(tokens, pool.grain, salt=0)
    grains = pool.block_size // pool.grain
    return keys[grains - 1 :: grains]


def crowd_out(engine):
    """Fill the cache with something else."""
    for number in range(-(-engine.pool.total // 3)):
        (result,) = drain(engine, generate(900 + number, ids(100, 900 + number), 1)).values()
        assert result.outputs


def test_later_turns_find_what_the_cache_has_lost(model, token_bytes, rows):
    """Tokens and log-probabilities are equal to the last bit."""
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
    load_always(engine)
    for request in conversations(4):
        drain(engine, request)
        assert len(engine.tier) <= 3
    (packed,) = engine.tier.transfers.memory.packed
    assert packed.numel() * packed.element_size() == 3 * block
    assert len(engine.tier) == 3


def test_memory_for_no_block_is_refused_with_the_numbers(model, token_bytes):
    block = block_bytes(model)
    with pytest.raises(ValueError, match=f"host_cache_bytes {block - 1}: one block takes {block}"):
        Engine(model, token_bytes, EngineConfig(host_cache_bytes=block - 1))


def test_no_memory_is_taken_unless_it_is_asked_for(model, token_bytes):
    assert Engine(model, token_bytes, EngineConfig()).tier is None


def test_what_computes_faster_is_not_loaded(model, token_bytes, rows):
    prompt = ids(100)
    engine = engine_of(model, token_bytes, 6, 100)
    first = drain(engine, generate(0, prompt))[0]
    crowd_out(engine)
    assert len(engine.tier) >= 3
    engine.tier.costs.loading_pays = lambda *_: False
    del rows[:]
    assert drain(engine, generate(2, prompt))[2].outputs == first.outputs
    assert rows[0] == 100


def test_a_reset_forgets_the_hosts_memory_too(model, token_bytes, rows):
    engine = engine_of(model, token_bytes, 6, 100)
    for seed in range(3):
        drain(engine, generate(seed, ids(100, seed)))
    assert len(engine.tier) > 0
    engine.reset_prefix_cache()
    assert len(engine.tier) == 0
    del rows[:]
    drain(engine, generate(9, ids(100, 0)))
    assert rows[0] == 100
    assert_consistent(engine)


def test_requests_that_come_together_share_what_is_loaded(model, token_bytes, rows):
    """The second request finds, in the same step, the blocks that are still being loaded."""
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
    """Its rows do not fit into its first step, so that step waits for no layer."""
    engine = engine_of(model, token_bytes, 12, 100, max_step_tokens=16)
    prompt = ids(100)
    wanted = drain(engine, generate(0, prompt))[0]
    crowd_out(engine)
    engine.submit(generate(2, prompt))
    loading = []
    load = engine.tier.transfers.load
    engine.tier.transfers.load = lambda pairs: loading.append(pairs) or load(pairs)
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
    forward, load, loading = Decoder.forward, engine.tier.transfers.load, []

    def marked(pairs):
        loading.extend(block for block, _ in pairs)
        engine.cache.keys[:, loading] = 7.0
        return load(pairs)

    def fails(*_):
        raise RuntimeError("no forward pass today")

    monkeypatch.setattr(Decoder, "forward", fails)
    monkeypatch.setattr(engine.tier.transfers, "load", marked)
    assert drain(engine, generate(2, ids(100)))[2].code == "internal_error"
    assert loading
    assert (engine.cache.keys[:, loading] == 7.0).all()  # nothing was loaded
    monkeypatch.setattr(engine.tier.transfers, "load", load)
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
    assert len(engine.tier) > 0
    keys = keys_of_blocks(engine, ids(100))
    assert len(keys) == 3
    assert not any(key in engine.tier for key in keys)


def test_a_prefix_that_is_spoiled_is_forgotten_by_the_host_too(model, token_bytes, monkeypatch):
    """Its request ended well, so it was saved; then a request that shares it is not finite."""
    engine = engine_of(model, token_bytes, 6, 100)
    drain(engine, generate(0, ids(100)))
    crowd_out(engine)
    keys = set(engine.tier.slot_of)
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, x: logits(self, x) * float("nan"))
    assert drain(engine, generate(2, ids(100)))[2].code == "not_finite"
    assert len(keys & set(engine.tier.slot_of)) == len(keys) - 3


def test_rankings_load_their_queries(model, token_bytes, rows):
    query = ids(100)
    engine = engine_of(model, token_bytes, 6, 100)
    wanted = drain(engine, RankRequest(0, query, [ids(5, 1), ids(6, 2)]))[0]
    crowd_out(engine)
    del rows[:]
    found = drain(engine, RankRequest(2, query, [ids(5, 1), ids(6, 2)]))[2]
    assert rows[0] < 4 + 5 + 4 + 5
    assert found.mean_nll == wanted.mean_nll


def test_the_engine_times_prompts_and_transfers(model, token_bytes, monkeypatch):
    slow = LoadCosts(1e6, 1e6, 0.0)
    monkeypatch.setattr(LoadCosts, "estimated", lambda *_: slow)
    block = block_bytes(model)
    config = EngineConfig(kv_cache_bytes=6 * block, host_cache_bytes=100 * block)
    engine = Engine(model, token_bytes, config)
    for seed in range(3):
        drain(engine, generate(seed, ids(100, seed), max_tokens=2))
    assert 0 < slow.token_s < 1e6
    assert 0 < slow.byte_s < 1e6


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
    """Blocks are filled with NaN before they are loaded, so that reading too early shows."""
    engine = engine_of(model, token_bytes, 6, 100)
    wanted = drain(engine, generate(0, ids(100)))[0]
    crowd_out(engine)
    load, seen = engine.tier.transfers.load, []

    def poisoned(pairs):
        blocks = [block for block, _ in pairs]
        engine.cache.keys[:, blocks] = torch.nan
        engine.cache.values[:, blocks] = torch.nan
        arrivals = load(pairs)
        seen.append(engine.cache.keys[:, blocks].isnan().all())
        return arrivals

    engine.tier.transfers.load = poisoned
    assert drain(engine, generate(2, ids(100)))[2].outputs == wanted.outputs
    assert seen == [True]


class Recorded:
    """Transfers that only record the calls."""

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
    """Evict blocks with their keys, in one step."""
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
    assert list(tier.slot_of) == [b"a", b"c"]


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
    assert tier.transfers.saved == [[(0, 7)]]
    assert tier.transfers.awaited[-1] == [5]  # it may still be leaving


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
    assert tier.transfers.loaded == [[(7, slots[0]), (8, slots[1])]]
    evict(tier, (4, b"e"))  # the load is over when the next step begins to write
    evict(tier, (4, b"f"))
    assert b"f" in tier


def test_two_blocks_never_leave_for_one_slot_in_one_step():
    tier = tier_of(1)
    evict(tier, (0, b"a"), (1, b"b"))
    assert tier.transfers.saved == [[(0, 0)]]
    tier.evicted(2, b"c")
    tier.spoiled(b"c")
    tier.evicted(3, b"d")
    tier.before_writes()
    assert len({slot for _, slot in tier.transfers.saved[-1]}) == len(tier.transfers.saved[-1])


def test_only_a_beginning_without_a_gap_is_loaded():
    tier = tier_of(8)
    evict(tier, (0, b"1"), (1, b"3"))
    assert tier.worth_loading([b"1", b"2", b"3"]) == [b"1"]
    assert tier.worth_loading([b"2", b"3"]) == ()


def test_a_miss_looks_up_one_key_and_compares_no_costs(monkeypatch):
    tier = tier_of(8)
    monkeypatch.setattr(LoadCosts, "loading_pays", lambda *_: pytest.fail("asked"))
    read = []

    class Watched(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    assert not tier.worth_loading(Watched([b"1", b"2", b"3"]))
    assert read in ([0], [0, slice(0, 0)])


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
    assert tier.transfers.saved == [[(0, 7), (1, 6)]]


def test_blocks_are_saved_before_their_turn_has_come(model, token_bytes):
    """They are saved in the step before the one that needs their room."""
    engine = engine_of(model, token_bytes, 6, 100)
    drain(engine, generate(0, ids(100)))
    assert len(engine.tier) == 0
    drain(engine, generate(1, ids(40, 1), max_tokens=1))
    assert len(engine.tier) == 3
    assert engine.pool.find(keys_of_blocks(engine, ids(100)))


def test_a_model_in_several_processes_has_none(model, token_bytes, monkeypatch, caplog):
    monkeypatch.setattr(Decoder, "in_lockstep", True)
    engine = Engine(model, token_bytes, EngineConfig(host_cache_bytes=1 << 20))
    assert engine.tier is None
    assert "host_cache_bytes has no effect" in caplog.text


def test_the_compute_process_gives_its_engine_the_memory(directory):
    def load(dtype):
        return load_model(directory, dtype)

    bytes_ = 5 * block_bytes(load("fp32"))
    config = ComputeConfig(directory.path, host_cache_bytes=bytes_)
    engine = build_engine(config, directory, directory.tokenizer(), load, dtype="fp32")
    assert engine.tier.slots == 5
