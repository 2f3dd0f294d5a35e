"""Who runs in a step, under each of the limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nightjar.gpu_worker.engine import (
    BeamSearch,
    EngineConfig,
    GenerateRequest,
    RankRequest,
    SamplingParams,
)
from nightjar.gpu_worker.engine.adapters import Tunings
from nightjar.gpu_worker.engine.admission import Admission
from nightjar.gpu_worker.engine.errors import RefusedError
from nightjar.gpu_worker.engine.kv_cache import BlockPool
from nightjar.gpu_worker.engine.ranking import RankJob
from nightjar.gpu_worker.engine.scheduler import Scheduler


class Room:
    """A scheduler over blocks of four tokens, and what the loop does around it."""

    def __init__(self, config, blocks=100, block_size=4, **limits):
        self.pool = BlockPool(blocks, block_size)
        engine = EngineConfig(block_size=block_size, **limits)
        self.admission = Admission(config, engine, self.pool, Tunings(config))
        self.scheduler = Scheduler(engine, self.pool)
        self.arrivals = 0

    def add(self, request):
        job = self.admission.admit(request, self.arrivals)
        self.arrivals += 1
        self.scheduler.add(job)
        return job

    def text(self, prompt=10, max_tokens=5, first=None, urgent=False, **params):
        # Prompts differ from the first token on, unless a test says otherwise.
        first = self.arrivals + 1 if first is None else first
        tokens = [first, *[1] * (prompt - 1)]
        sampling = SamplingParams(max_tokens, **params)
        return self.add(GenerateRequest(0, tokens, sampling, urgent=urgent))

    def ranking(self, query=10, documents=(5, 5), **params):
        tokens = [self.arrivals + 1, *[2] * (query - 1)]
        documents = [[100 + i, *[3] * (n - 1)] for i, n in enumerate(documents)]
        return self.add(RankRequest(0, tokens, documents, **params))

    def step(self):
        """Plan a step and settle it; returns it in short: chunks, texts started, texts running,
        documents looked at."""
        plan = self.plan = self.scheduler.schedule()
        chunks = [(c.prefix.tokens[0], c.start, c.end) for c in plan.chunks]
        starts = [s.job.arrival for prompt in plan.prompts for s in prompt.starts]
        decodes = [s.job.arrival for s in plan.decodes]
        looks = [(b.job.arrival, b.document.index, b.depth) for b in plan.branches]
        for work in [*plan.prompts, *plan.ranks]:
            self.scheduler.settle(work)
        for sequence in plan.sampled:
            sequence.generated.append(3)
        for branch in plan.branches:
            branch.job.add(branch, torch.ones(branch.depth).numpy())
            self.scheduler.close_parts(branch.job)
            if not branch.job.waiting:
                self.scheduler.remove(branch.job)
        self._branch_searches(plan)
        return chunks, starts, decodes, looks

    def _branch_searches(self, plan):
        """Let every beam search run as many texts as it is wide."""
        for job in dict.fromkeys(s.job for s in plan.sampled if s.job.beams is not None):
            parents, width = job.running, job.request.sampling.width
            children = [(p, p.branch()) for p in (parents * width)[:width]]
            self.scheduler.replace_beams(job, children)
            self.scheduler.take_copies()

    @property
    def busy(self):
        return self.scheduler.has_waiting or bool(self.scheduler.running)

    def end_sequences(self):
        """End what has as many tokens as it may have."""
        for sequence in self.scheduler.running:
            job = sequence.job
            if len(sequence.generated) >= sequence.sampling.max_tokens and sequence.table:
                if job.beams is None:
                    self.scheduler.finish(sequence)
                if job.beams is not None or not (job.waiting or job.running):
                    self.scheduler.remove(job)


@pytest.fixture(scope="module")
def room(directory):
    return lambda **kwargs: Room(directory.config, **kwargs)


def rows(plan):
    """Packed rows of a step."""
    chunks = sum(chunk.end - chunk.start for chunk in plan.chunks)
    return len(plan.decodes) + chunks + sum(len(branch.fed) for branch in plan.branches)


def test_texts_run_first_come_first_served_within_the_places(room):
    room = room(max_running=2)
    first, _, _ = (room.text() for _ in range(3))
    assert room.step()[1:3] == ([0, 1], [])
    assert room.step()[1:3] == ([], [0, 1])
    room.scheduler.remove(first)
    assert room.step()[1:3] == ([2], [1])


def test_rows_of_a_step_are_bounded(room):
    room = room(max_step_tokens=25)
    for _ in range(4):
        room.text()
    # The third prompt is cut at the end of a block.
    assert room.step()[:2] == ([(1, 0, 10), (2, 0, 10), (3, 0, 4)], [0, 1])
    assert room.step()[:3] == ([(3, 4, 10), (4, 0, 10)], [2, 3], [0, 1])


def test_a_long_prompt_does_not_keep_running_texts_waiting(room):
    room = room(max_step_tokens=25)
    room.text(max_tokens=30)
    room.text(prompt=60)
    steps = [room.step() for _ in range(4)]
    assert [chunks for chunks, *_ in steps] == [
        [(1, 0, 10), (2, 0, 12)],
        [(2, 12, 36)],
        [(2, 36, 60)],
        [],
    ]
    assert [decodes for _, _, decodes, _ in steps] == [[], [0], [0], [0, 1]]


def test_rows_too_few_for_a_block_are_used_when_nothing_else_is(room):
    room = room(max_step_tokens=3)
    room.text(prompt=5)
    assert [room.step()[0] for _ in range(3)] == [[(1, 0, 3)], [(1, 3, 5)], []]


def test_a_ranking_is_cut_where_the_rows_end(room):
    room = room(max_step_tokens=22)
    job = room.ranking(documents=(5, 5, 5, 5, 5, 5))
    looks = [room.step()[3] for _ in range(2)]
    assert looks == [[(0, i, 5) for i in (0, 1, 2)], [(0, i, 5) for i in (3, 4, 5)]]
    assert isinstance(job, RankJob)
    assert room.pool.available == 100
    assert room.step() == ([], [], [], [])


def test_a_document_larger_than_a_step_runs_when_nothing_else_does(room):
    room = room(max_step_tokens=12)
    room.ranking(documents=(30, 5))
    assert [room.step()[::3] for _ in range(3)] == [
        ([(1, 0, 10)], []),
        ([], [(0, 0, 30)]),
        ([], [(0, 1, 5)]),
    ]


def test_the_kind_that_waited_longer_goes_first(room):
    one = room(max_step_tokens=25)
    one.ranking(documents=(6, 6))
    one.text()
    one.ranking()
    chunks, starts, _, looks = one.step()
    assert (chunks, starts) == ([(2, 0, 4), (1, 0, 10)], [])
    assert looks == [(0, 0, 6), (0, 1, 6)]
    other = room(max_step_tokens=25)
    other.text()
    other.ranking()
    assert other.step() == ([(1, 0, 10), (2, 0, 10)], [0], [], [(1, 0, 5)])


def test_texts_wait_for_places_and_rankings_pass(room):
    room = room(max_running=1)
    room.text()
    room.text()
    room.ranking()
    chunks, starts, _, looks = room.step()
    assert chunks == [(1, 0, 10), (3, 0, 10)]
    assert (starts, len(looks)) == ([0], 2)


def test_nobody_overtakes_a_request_that_waits_for_blocks(room):
    room = room(blocks=6)
    first = room.text()  # 14 tokens: 4 blocks
    room.ranking(query=16)
    room.text(prompt=4, max_tokens=2)
    assert room.step()[:2] == ([(1, 0, 10)], [0])
    assert room.step() == ([], [], [0], [])
    room.scheduler.remove(first)
    assert room.step()[:2] == ([(3, 0, 4), (2, 0, 16)], [2])


def test_blocks_grow_with_the_text(room):
    room = room()
    job = room.text(prompt=3, max_tokens=6)
    for expected in (1, 1, 2, 2, 2):
        room.step()
        assert len(job.running[0].table.blocks) == expected
    assert room.pool.available == 98
    room.scheduler.remove(job)
    assert room.pool.available == 100


def test_a_known_prompt_is_not_computed_again(room):
    room = room()
    room.text(first=7)
    room.step()
    room.text(first=7)
    assert room.step()[0] == [(7, 8, 10)]
    room.text(prompt=8, first=7)
    # The last token is computed in any case: the next one is predicted from it.
    assert room.step()[0] == [(7, 4, 8)]


def test_the_beginning_of_a_block_is_copied_to_one_of_its_own(room):
    room = room(block_size=16)
    first = room.text(prompt=30, first=7)
    room.step()
    second = room.text(prompt=40, first=7)
    assert room.step()[0] == [(7, 24, 40)]
    source, copy = first.running[0].held.blocks[1], second.running[0].held.blocks[1]
    assert room.scheduler.take_copies() == [(source, copy)]
    assert room.scheduler.take_copies() == []
    assert first.running[0].held.blocks[0] == second.running[0].held.blocks[0]
    room.scheduler.remove(first)
    room.scheduler.remove(second)
    assert room.pool.available == 100


def test_the_source_of_a_copy_is_not_drawn_before_it_is_copied(room):
    room = room(block_size=16, blocks=4)
    room.scheduler.remove(room.text(prompt=30, max_tokens=1, first=7))
    first = room.text(prompt=30, max_tokens=1, first=7)
    room.step()
    room.scheduler.remove(first)  # its second block rests
    room.text(prompt=31, max_tokens=1, first=7)
    room.text(prompt=32, max_tokens=1)
    # Three blocks are free or become so: the second text waits for the one that is copied.
    assert room.step()[:2] == ([(7, 24, 31)], [2])
    assert room.scheduler.take_copies() == [(1, 2)]
    assert room.step()[:2] == ([(4, 0, 32)], [3])


def test_without_a_block_to_copy_to_the_beginning_is_computed(room):
    room = room(block_size=16, blocks=2)
    first = room.text(prompt=30, max_tokens=1, first=7)
    room.step()
    room.scheduler.remove(first)
    room.text(prompt=31, max_tokens=1, first=7)
    assert room.step()[0] == [(7, 16, 31)]
    assert room.scheduler.take_copies() == []


def test_a_prefix_under_way_is_waited_for_and_nobody_behind_it(room):
    room = room()
    room.text(first=7)
    room.text(first=7)
    room.text()
    assert room.step()[:2] == ([(7, 0, 10), (3, 0, 10)], [0, 2])
    assert room.step()[:2] == ([(7, 8, 10)], [1])


def test_samples_fork_from_one_prompt(room):
    room = room(max_running=3)
    job = room.text(n=4, temperature=1.0, max_tokens=6)
    # Three blocks of the prompt; each sample has two of its own, and shares two.
    assert room.step()[:2] == ([(1, 0, 10)], [0, 0, 0])
    assert room.scheduler.take_copies() == [
        (job.prefix.table.blocks[2], sequence.table.blocks[2]) for sequence in job.running
    ]
    assert room.pool.available == 100 - 3 - 4 * 2
    room.scheduler.finish(job.running[0])
    assert room.step()[1:3] == ([0], [0, 0])
    assert job.prefix.table is None
    assert room.pool.available == 100 - 2 - 3 * 2
    room.scheduler.remove(job)
    assert room.pool.available == 100


def test_documents_that_begin_alike_share_their_beginning(room):
    room = room()
    beginning = list(range(200, 240))
    documents = [[*beginning, 300 + i, 5] for i in range(4)] + [[400, 401]]
    room.add(RankRequest(0, [9] * 10, documents))
    # The query, and the lonely document; then what the others share, from the query's last
    # whole block on.
    assert room.step() == ([(9, 0, 10)], [], [], [(0, 4, 2)])
    chunks, _, _, looks = room.step()
    assert chunks == [(9, 8, 50)]
    assert looks == [(0, i, 2) for i in range(4)]
    assert room.pool.available == 100


def test_only_the_best_documents_are_looked_at_to_the_end(room):
    room = room()
    job = room.ranking(documents=(20, 20, 20), top_n=1)
    assert room.step()[3] == [(0, 0, 1), (0, 1, 1), (0, 2, 1)]
    for document, known in zip(job.parts[0].documents, (40.0, 2.0, 90.0), strict=True):
        document.known = known
    assert room.step()[3] == [(0, 1, 20)]
    job.prune()
    assert [document.index for document in job.waiting] == []
    assert job.scores() == [None, 1.0, None]


def test_a_wide_search_starts_when_the_texts_before_it_have_ended(room):
    """However many narrow texts come after it."""
    room = room(max_running=6)
    for _ in range(6):
        room.text(max_tokens=8)
    room.step()
    search = room.text(max_tokens=4, beams=BeamSearch(5))
    started = []
    for _ in range(9):
        room.text(max_tokens=8)
        room.text(max_tokens=8)
        started.append(room.step()[1])
        room.end_sequences()
    # Those that came later have waited, and got the place that was left.
    assert started == [[]] * 7 + [[search.arrival, search.arrival + 1], []]
    assert len(search.running) == 5


def test_a_search_under_way_keeps_its_places(room):
    """A prompt of many chunks, while places are free that a narrow text could take."""
    room = room(max_running=4, max_step_tokens=24)
    room.text(max_tokens=40)
    room.step()
    search = room.text(prompt=60, max_tokens=4, beams=BeamSearch(3))
    for _ in range(5):
        room.text(prompt=2, max_tokens=40)
        room.step()
    assert len(search.running) == 3


def test_a_started_ranking_that_lacks_blocks_is_not_overtaken(room):
    """Its second prefix needs most of the cache, and texts that need little keep coming."""
    room = room(blocks=24)
    beginning = list(range(200, 272))
    documents = [[400, 401]] + [[*beginning, 300 + i, 5] for i in range(4)]
    for _ in range(2):
        room.text(prompt=4, max_tokens=12)
        room.step()
    ranking = room.add(RankRequest(0, [9] * 4, documents))
    for _ in range(20):
        room.text(prompt=4, max_tokens=12)
        room.step()
        room.end_sequences()
        if not ranking.waiting:
            break
    assert not ranking.waiting


def test_samples_and_beams_fit_into_the_rows_of_a_step(room):
    room = room(max_step_tokens=8)
    room.text(prompt=5, n=20, temperature=1.0)
    room.text(prompt=5, max_tokens=6, beams=BeamSearch(8))
    for _ in range(60):
        room.step()
        assert rows(room.plan) <= 8
        room.end_sequences()
    assert room.pool.available == 100


def test_a_search_wider_than_a_step_is_refused(room):
    with pytest.raises(RefusedError, match="at most 8 sequences run together"):
        room(max_step_tokens=8).text(prompt=5, beams=BeamSearch(9))


texts = st.fixed_dictionaries(
    {"prompt": st.integers(1, 40), "max_tokens": st.integers(1, 9)},
    optional={
        "n": st.integers(2, 9),
        "beams": st.integers(1, 3).map(BeamSearch),
        "first": st.integers(1, 3),
    },
)
rankings = st.fixed_dictionaries(
    {
        "query": st.integers(1, 30),
        "documents": st.lists(st.integers(1, 30), min_size=1, max_size=8),
    },
    optional={"top_n": st.integers(1, 3)},
)


def hand_in(room, params):
    """Add a request; returns how many steps it can need at most, were each to compute one row."""
    if "query" in params:
        room.ranking(**params)
        return params["query"] + sum(params["documents"]) + 2 * len(params["documents"])
    if "beams" in params:
        params = params | {"n": 1}
    elif "n" in params:
        params = params | {"temperature": 1.0}
    job = room.text(**params)
    return params["prompt"] + job.request.sampling.width * params["max_tokens"]


@settings(max_examples=150, deadline=None)
@given(
    coming=st.lists(st.tuples(st.integers(0, 20), texts | rankings), min_size=1, max_size=10),
    max_running=st.sampled_from([3, 8]),
    max_step_tokens=st.sampled_from([3, 7, 40]),
    blocks=st.sampled_from([60, 90]),
)
def test_every_step_keeps_its_limits_and_every_request_ends(
    room, coming, max_running, max_step_tokens, blocks
):
    room = room(blocks=blocks, max_running=max_running, max_step_tokens=max_step_tokens)
    step, end = 0, max(when for when, _ in coming)
    while step <= end or room.busy:
        end += sum(hand_in(room, params) for when, params in coming if when == step)
        running, busy = room.scheduler.running, room.busy
        room.step()
        plan = room.plan
        assert plan.decodes == running
        assert len(running) <= max_running
        # A document is computed in one piece, without others where it goes past the limit.
        alone = len(plan.branches) == 1 and not any(plan.chunks)
        assert rows(plan) <= max_step_tokens or alone
        assert bool(plan) == busy
        room.end_sequences()
        step += 1
        assert step <= end + 1
    assert room.pool.available == blocks
    assert not room.pool.held


def test_an_urgent_request_goes_before_those_that_wait(room):
    room = room(max_running=2, urgent_running=0)
    for _ in range(4):
        room.text(max_tokens=1)
    assert room.step()[1] == [0, 1]
    first = room.text(max_tokens=1, urgent=True)
    second = room.text(max_tokens=1, urgent=True)
    room.end_sequences()
    assert room.step()[1] == [first.arrival, second.arrival]
    room.end_sequences()
    assert room.step()[1] == [2, 3]


def test_an_urgent_ranking_goes_before_texts(room):
    room = room(max_step_tokens=20)
    for _ in range(3):
        room.text(prompt=10)
    urgent = room.ranking(urgent=True)
    chunks, starts, _, looks = room.step()
    assert chunks[0][0] == urgent.arrival + 1
    assert {arrival for arrival, _, _ in looks} == {urgent.arrival}
    assert starts == []


def test_an_urgent_text_runs_beside_sequences_that_hold_every_slot(room):
    room = room(max_running=2, urgent_running=2)
    for _ in range(4):
        room.text(max_tokens=9)
    assert room.step()[1] == [0, 1]
    assert room.step()[1:3] == ([], [0, 1])
    urgent = [room.text(max_tokens=2, urgent=True) for _ in range(3)]
    assert room.step()[1] == [job.arrival for job in urgent[:2]]
    assert room.step()[1:3] == ([], [0, 1, 4, 5])
    room.end_sequences()
    # The urgent slots are free again; those of the others are still taken.
    assert room.step()[1:3] == ([urgent[2].arrival], [0, 1])


def test_urgent_texts_leave_no_more_slots_to_the_others(room):
    room = room(max_running=2, urgent_running=1)
    room.text(max_tokens=3, urgent=True)
    for _ in range(3):
        room.text(max_tokens=9)
    assert room.step()[1] == [0, 1]
    assert room.step()[1:3] == ([], [0, 1])


def test_a_wide_search_that_waits_does_not_hold_urgent_slots(room):
    room = room(max_running=4, urgent_running=1)
    room.text(max_tokens=9)
    room.step()
    room.text(beams=BeamSearch(4), max_tokens=5)
    assert room.step()[1] == []
    urgent = room.text(max_tokens=2, urgent=True)
    assert room.step()[1] == [urgent.arrival]
