"""Who runs in a step, under each of the limits."""

import torch

from nightjar.gpu_worker.engine import EngineConfig, SamplingParams
from nightjar.gpu_worker.engine.kv_cache import BlockPool
from nightjar.gpu_worker.engine.scheduler import Scheduler
from nightjar.gpu_worker.engine.sequence import GenerateSequence, RankSequence
from nightjar.gpu_worker.engine.stopping import StopMatcher


def text(arrival, prompt=10, max_tokens=5):
    params = SamplingParams(max_tokens)
    return GenerateSequence(arrival, [1] * prompt, params, StopMatcher(()), 0, arrival)


def ranking(arrival, query=10, documents=(5, 5)):
    return RankSequence(arrival, [1] * query, [[2] * n for n in documents], 0, arrival)


def scheduler(blocks=100, **config):
    config = EngineConfig(block_size=4, **config)
    pool = BlockPool(blocks, 4)
    return Scheduler(config, pool), pool


def admitted(plan):
    return (
        [s.request_id for s in plan.prefills],
        [s.request_id for s in plan.decodes],
        [(p.sequence.request_id, p.start, p.end) for p in plan.ranks],
    )


def advance(plan):
    """What the loop does after a step in which nothing ended."""
    for sequence in plan.prefills + plan.decodes:
        sequence.generated.append(3)
    for piece in plan.ranks:
        piece.sequence.query_hidden = torch.zeros(1)
        piece.sequence.next_document = piece.end


def test_texts_run_first_come_first_served_within_the_places():
    rooms, _ = scheduler(max_running=2)
    texts = [text(i) for i in range(3)]
    for sequence in texts:
        rooms.add(sequence)
    first = rooms.schedule()
    assert admitted(first) == ([0, 1], [], [])
    advance(first)
    second = rooms.schedule()
    assert admitted(second) == ([], [0, 1], [])
    advance(second)
    rooms.remove(texts[0])
    assert admitted(rooms.schedule()) == ([2], [1], [])


def test_rows_of_a_step_are_bounded():
    rooms, _ = scheduler(max_step_tokens=25)
    for i in range(4):
        rooms.add(text(i))
    plan = rooms.schedule()
    assert admitted(plan) == ([0, 1], [], [])
    advance(plan)
    # Two running rows leave 23 for prompts.
    assert admitted(rooms.schedule()) == ([2, 3], [0, 1], [])


def test_a_prompt_larger_than_a_step_joins_running_texts():
    rooms, _ = scheduler(max_step_tokens=25)
    rooms.add(text(0))
    rooms.add(text(1, prompt=60))
    rooms.add(text(2))
    plan = rooms.schedule()
    assert admitted(plan) == ([0], [], [])
    advance(plan)
    assert admitted(rooms.schedule()) == ([1], [0], [])


def test_a_ranking_is_cut_where_the_rows_end():
    rooms, pool = scheduler(max_step_tokens=22)
    sequence = ranking(0, documents=(5, 5, 5, 5, 5, 5))
    rooms.add(sequence)
    pieces = []
    while sequence.next_document < 6:
        plan = rooms.schedule()
        pieces += admitted(plan)[2]
        advance(plan)
    assert pieces == [(0, 0, 2), (0, 2, 6)]
    rooms.remove(sequence)
    assert pool.available == 100
    assert admitted(rooms.schedule()) == ([], [], [])


def test_the_kind_that_waited_longer_goes_first():
    rooms, _ = scheduler(max_step_tokens=25)
    rooms.add(ranking(0))
    rooms.add(text(1))
    rooms.add(ranking(2))
    assert admitted(rooms.schedule()) == ([], [], [(0, 0, 2)])
    rooms, _ = scheduler(max_step_tokens=25)
    rooms.add(text(0))
    rooms.add(ranking(1))
    assert admitted(rooms.schedule()) == ([0], [], [(1, 0, 1)])


def test_texts_wait_for_blocks_and_rankings_pass():
    rooms, pool = scheduler(blocks=6)
    rooms.add(text(0))  # 14 tokens: 4 blocks
    rooms.add(text(1))
    rooms.add(ranking(2, query=8))
    assert admitted(rooms.schedule()) == ([0], [], [(2, 0, 2)])
    assert pool.available == 0


def test_a_query_that_waits_for_blocks_is_not_overtaken_by_texts():
    rooms, _ = scheduler(blocks=6)
    first = text(0)
    rooms.add(first)
    advance(rooms.schedule())
    rooms.add(ranking(1, query=16))
    rooms.add(text(2, prompt=4, max_tokens=2))
    plan = rooms.schedule()
    assert admitted(plan) == ([], [0], [])
    rooms.remove(first)
    assert admitted(rooms.schedule()) == ([2], [], [(1, 0, 2)])


def test_blocks_grow_with_the_text():
    rooms, pool = scheduler()
    sequence = text(0, prompt=3, max_tokens=6)
    rooms.add(sequence)
    for expected in (1, 1, 2, 2, 2):
        advance(rooms.schedule())
        assert len(sequence.table.blocks) == expected
    assert pool.available == 98
