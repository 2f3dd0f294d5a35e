"""What an engine counts, against what its requests and their answers say."""

import pytest

from nightjar.gpu_worker.engine import Engine, EngineConfig, RankRequest
from nightjar.gpu_worker.engine.statistics import (
    CONTENTS,
    PHASES,
    EngineCounters,
    EngineStatistics,
)
from nightjar.gpu_worker.models import Decoder
from tests.engines import drain, generate, ids

pytestmark = pytest.mark.usefixtures("one_thread")


def statistics_after(engine, *requests):
    results = drain(engine, *requests)
    return results, engine.statistics()


def test_tokens_are_those_of_the_prompts_and_answers(model, token_bytes):
    engine = Engine(model, token_bytes, EngineConfig())
    requests = [generate(number, ids(40 + number, number), 6) for number in range(3)]
    _, told = statistics_after(engine, *requests)
    counted = told.counters
    assert counted.decode_tokens == 18
    assert counted.prefill_tokens == counted.prefix_tokens == 40 + 41 + 42
    assert counted.cached_tokens == counted.rank_tokens == counted.recomputed == 0
    assert counted.sequence_steps == 18
    assert counted.slot_steps == EngineConfig().slots * sum(counted.steps.values())
    assert counted.steps["decode"] == 5


def test_what_the_prefix_cache_held_is_not_computed(model, token_bytes):
    engine = Engine(model, token_bytes, EngineConfig())
    prompt = ids(90)
    drain(engine, generate(0, prompt, 2))
    first = engine.statistics().counters
    _, told = statistics_after(engine, generate(1, prompt, 2))
    hit = told.counters.cached_tokens - first.cached_tokens
    assert hit >= 64
    assert told.counters.prefill_tokens - first.prefill_tokens == 90 - hit
    assert told.counters.prefix_tokens == 180
    assert told.gauges.resting_blocks >= 2


def test_the_gauges_show_a_running_batch_and_an_idle_engine(model, token_bytes):
    engine = Engine(model, token_bytes, EngineConfig(max_running=2))
    for number in range(4):
        engine.submit(generate(number, ids(40, number), 8))
    assert engine.statistics().gauges.waiting == 4
    engine.step()
    busy = engine.statistics().gauges
    assert (busy.running, busy.slots, busy.waiting) == (2, 2, 2)
    assert busy.held_blocks == 4
    assert busy.blocks == engine.pool.total
    while engine.has_work:
        engine.step()
    idle = engine.statistics().gauges
    assert (idle.running, idle.waiting, idle.held_blocks, idle.reserved_blocks) == (0, 0, 0, 0)


def test_documents_that_cannot_win_are_counted(model, token_bytes, monkeypatch):
    """The tiny model finds all tokens alike; here those of each further 128 cost more."""
    original = Decoder.token_nll

    def spread(self, hidden, rows, targets):
        return original(self, hidden, rows, targets).add_((targets // 128 * 40).float())

    monkeypatch.setattr(Decoder, "token_nll", spread)
    engine = Engine(model, token_bytes, EngineConfig())
    documents = [[2 + 128 * (i % 4) + token for token in range(40)] for i in range(8)]
    results, told = statistics_after(engine, RankRequest(0, ids(20), documents, None, 2))
    dropped = results[0].mean_nll.count(None)
    assert dropped > 0
    assert (told.counters.documents, told.counters.pruned_documents) == (8, dropped)
    assert 0 < told.counters.rank_tokens < 20 + 8 * 40
    assert told.counters.padded_rows > 0


def test_each_phase_takes_time_and_each_step_has_a_content(model, token_bytes):
    engine = Engine(model, token_bytes, EngineConfig())
    ranking = RankRequest(1, ids(20), [ids(9, 3)], None, None)
    _, told = statistics_after(engine, generate(0, ids(30), 4))
    drain(engine, ranking)
    told = engine.statistics()
    assert set(told.counters.phase_s) == set(PHASES)
    for name in ("receive", "schedule", "prefill", "decode", "rank", "process"):
        assert told.counters.phase_s[name] > 0, name
    assert told.counters.phase_s["recompute"] == 0
    assert set(told.counters.steps) == set(CONTENTS)
    assert told.counters.steps["prefill"] == told.counters.steps["rank"] == 1


def test_counts_of_two_processes_add_up(model, token_bytes):
    engine = Engine(model, token_bytes, EngineConfig())
    _, told = statistics_after(engine, generate(0, ids(30), 4))
    twice = told.counters.plus(told.counters)
    assert twice.decode_tokens == 8
    assert twice.steps["decode"] == 2 * told.counters.steps["decode"]
    assert told.counters.plus(EngineCounters()) == told.counters


def test_a_reading_does_not_change_with_the_engine(model, token_bytes):
    engine = Engine(model, token_bytes, EngineConfig())
    _, told = statistics_after(engine, generate(0, ids(30), 4))
    before = told.counters.plus(EngineCounters())
    drain(engine, generate(1, ids(30, 1), 4))
    assert told == EngineStatistics(before, told.gauges)
