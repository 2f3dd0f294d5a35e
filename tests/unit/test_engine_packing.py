"""Rows of a step, and the scores read off its hidden states."""

import numpy as np
import pytest
import torch

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import GenerateRequest, RankRequest, SamplingParams
from nightjar.gpu_worker.engine.adapters import Tuning
from nightjar.gpu_worker.engine.executor import Executor
from nightjar.gpu_worker.engine.kv_cache import BlockPool, BlockTable
from nightjar.gpu_worker.engine.packing import pack
from nightjar.gpu_worker.engine.plan import PrefixChunk, PromptWork, RankWork, StepPlan
from nightjar.gpu_worker.engine.prompt_vectors import PromptVectors
from nightjar.gpu_worker.engine.ranking import Branch, Document, RankJob, RankPart
from nightjar.gpu_worker.engine.sequence import GenerateJob, GenerateSequence, Prefix
from nightjar.gpu_worker.engine.stopping import StopMatcher
from nightjar.gpu_worker.models import KVTensors, load_model
from tests.engines import VOCAB


def table(pool, tokens):
    assert pool.reserve(pool.blocks_for(tokens))
    held = BlockTable(pool, pool.blocks_for(tokens))
    held.grow(tokens)
    return held


def prefix(tokens, pool, vectors=None, scored_from=None):
    scored = len(tokens) if scored_from is None else scored_from
    return Prefix(tokens, Tuning(vectors), [], scored, 0, table(pool, len(tokens)))


def text(prompt, pool, generated=(), vectors=None):
    request = GenerateRequest(5, prompt, SamplingParams(9))
    job = GenerateJob(request, 0, prefix(prompt, pool, vectors), {}, 512)
    sequence = GenerateSequence(job, 0, StopMatcher(()), None)
    sequence.generated.extend(generated)
    if generated:
        sequence.table = table(pool, sequence.length)
    return sequence


def ranking(query, documents, pool, vectors=None, shared=()):
    """The plan of a whole ranking in one step; `shared` tokens stand in the prefix."""
    whole = [[*shared, *document] for document in documents]
    part = RankPart(prefix([*query, *shared], pool, vectors, len(query)), [])
    for index, document in enumerate(documents):
        part.documents.append(Document(index, document, len(whole[index])))
    job = RankJob(RankRequest(1, query, whole), 1, [part])
    chunk = PrefixChunk(part.prefix, 0, len(part.prefix.tokens))
    looks = [Branch(job, part, d, len(d.tokens)) for d in part.documents]
    return RankWork(job, [(part, chunk)], looks)


def test_rows_stand_in_order_with_their_positions_and_blocks():
    pool = BlockPool(40, 4)
    new = text([10, 11, 12, 13, 14], pool)
    ranked = ranking([20, 21], [[30, 31, 32], [40], [50, 51]], pool)
    running = text([1, 2, 3, 4], pool, generated=[5, 6])
    chunk = PrefixChunk(new.job.prefix, 0, 5)
    plan = StepPlan([PromptWork(new.job, chunk, [new])], [running], [ranked])
    batch = pack(plan, VOCAB, 4)
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 6, 30, 31, 50]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 2, 3, 2]
    assert batch.prompt_vectors is None
    assert batch.write_blocks.tolist() == [0, 0, 0, 0, 1, 2, 2, 5]
    assert batch.write_offsets.tolist() == [0, 1, 2, 3, 0, 0, 1, 1]
    assert batch.output_rows.tolist() == [4, 6, 7, 8, 9, 10]
    assert (batch.prefill.rows, batch.write_blocks.shape[0]) == (7, 8)


def test_a_step_holds_the_vectors_that_its_rows_read_and_no_others():
    pool = BlockPool(60, 4)
    a, b, unread = (PromptVectors.of(torch.full((n, 3), float(n))) for n in (2, 3, 4))
    prompts = [
        text([VOCAB, VOCAB + 1, 5], pool, vectors=a),
        text([6, 7], pool, vectors=unread),
        text([8, VOCAB + 2, VOCAB], pool, vectors=b),
        text([VOCAB + 1], pool, vectors=a),
    ]
    chunks = [PrefixChunk(one.job.prefix, 0, len(one.job.prefix.tokens)) for one in prompts]
    works = [PromptWork(one.job, c, [one]) for one, c in zip(prompts, chunks, strict=True)]
    running = text([VOCAB], pool, generated=[9], vectors=unread)
    batch = pack(StepPlan(works, [running]), VOCAB, 4)
    assert batch.vector_bases.tolist() == [0, 0, 0, 0, 0, 2, 2, 2, 0, 0]
    assert batch.prompt_vectors.tolist() == [[2.0] * 3] * 2 + [[3.0] * 3] * 3
    # Later chunks, past the vectors, read none.
    chunk = PrefixChunk(prompts[0].job.prefix, 2, 3)
    later = pack(StepPlan([PromptWork(prompts[0].job, chunk, [])], [running]), VOCAB, 4)
    assert later.prompt_vectors is None


def test_a_chunk_stands_at_its_positions_and_wants_what_is_scored():
    pool = BlockPool(40, 4)
    # Six tokens, the last three of them scored.
    ranked = ranking([20, 21, 22], [[30], [31]], pool, shared=[23, 24, 25])
    part, _ = ranked.chunks[0]
    ranked.branches.clear()
    for start, end, wanted in ((0, 2, []), (2, 4, [0, 1]), (4, 6, [0, 1])):
        ranked.chunks[0] = part, PrefixChunk(part.prefix, start, end)
        batch = pack(StepPlan(ranks=[ranked]), VOCAB, 4)
        assert batch.token_ids.tolist() == [20 + i for i in range(start, end)]
        assert batch.positions.tolist() == list(range(start, end))
        assert batch.output_rows.tolist() == wanted


def test_a_query_computed_before_is_not_computed_again():
    pool = BlockPool(20, 4)
    ranked = ranking([20, 21, 22], [[30, 31], [40, 41, 42]], pool)
    ranked.chunks.clear()
    del ranked.branches[0]
    batch = pack(StepPlan(ranks=[ranked]), VOCAB, 4)
    assert batch.token_ids.tolist() == [40, 41]
    assert batch.positions.tolist() == [3, 4]
    assert batch.prefill is None
    assert batch.write_blocks.shape[0] == 0
    assert batch.branch.prefix_lengths.tolist() == [3]


def test_a_sequence_without_blocks_is_a_mistake_of_ours():
    sequence = text([1], BlockPool(4, 4), generated=[2])
    sequence.table = None
    with pytest.raises(RuntimeError, match="request 5"):
        pack(StepPlan(decodes=[sequence]), VOCAB, 4)


def test_scores_pair_each_token_with_the_row_before_it(tiny_model, monkeypatch):
    model = load_model(ModelDirectory.open(tiny_model), "fp32")
    pool = BlockPool(40, 4)
    # 512 is a prompt vector: read, not scored.
    first = ranking([20, 21], [[5, 6, 7], [8], [9, 512]], pool)
    vectors = PromptVectors.of(torch.ones(89, 32))
    second = ranking([22, 23], [[4, 3], [600, 2]], pool, vectors, shared=[11, 12])
    earlier = ranking([24], [[13, 14]], pool)
    earlier.chunks.clear()
    generator = torch.Generator().manual_seed(0)
    # Wanted rows: the end of the first query; from the end of the second on, its two shared
    # tokens; then the documents' fed tokens: 2, 0, 1, 1, 1, 1.
    rows = torch.randn(1 + 3 + 6, 32, generator=generator)
    kept = torch.randn(32, generator=generator)
    earlier.branches[0].part.prefix.last_hidden = kept
    monkeypatch.setattr(type(model), "forward", lambda *_: rows)
    cache = KVTensors.allocate(model.config, 40, 4, model.cache_dtype, "cpu")
    output = Executor(model, cache, (), lambda: None).run(StepPlan(ranks=[first, second, earlier]))
    with torch.inference_mode():
        every = -model.logits(torch.cat((rows, kept[None]))).double().log_softmax(-1).numpy()
    looks = [nll for _, nll in output.probes]
    expected = [
        every[[0, 4, 5], [5, 6, 7]],
        every[[0], [8]],
        every[[0], [9]],
        every[[3, 7], [4, 3]],
        every[[8], [2]],
        every[[10, 9], [13, 14]],
    ]
    for found, values in zip(looks, expected, strict=True):
        np.testing.assert_allclose(found, values, rtol=1e-5)
    shared = {id(part): nll for part, nll in output.shared}
    assert len(shared[id(first.chunks[0][0])]) == 0
    np.testing.assert_allclose(shared[id(second.chunks[0][0])], every[[1, 2], [11, 12]], rtol=1e-5)
    ends = {id(found): hidden for found, hidden in output.hidden}
    assert torch.equal(ends[id(first.chunks[0][1].prefix)], rows[0])
