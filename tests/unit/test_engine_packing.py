"""Rows of a step, and the scores read off its hidden states."""

import numpy as np
import pytest
import torch

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import SamplingParams
from nightjar.gpu_worker.engine.kv_cache import BlockPool, BlockTable
from nightjar.gpu_worker.engine.packing import pack
from nightjar.gpu_worker.engine.ranking import score_documents
from nightjar.gpu_worker.engine.sequence import (
    GenerateSequence,
    RankPiece,
    RankSequence,
    StepPlan,
)
from nightjar.gpu_worker.engine.stopping import StopMatcher
from nightjar.gpu_worker.models import load_model


def text(prompt, pool, generated=(), base=0):
    sequence = GenerateSequence(0, prompt, SamplingParams(9), StopMatcher(()), base, 0)
    sequence.generated.extend(generated)
    sequence.table = BlockTable.reserve(pool, 40)
    sequence.table.grow(sequence.length)
    return sequence


def ranking(query, documents, pool, base=0):
    sequence = RankSequence(1, query, documents, base, 1)
    sequence.table = BlockTable.reserve(pool, len(query))
    sequence.table.grow(len(query))
    return sequence


def test_rows_stand_in_order_with_their_positions_and_blocks():
    pool = BlockPool(40, 4)
    new = text([10, 11, 12, 13, 14], pool, base=3)
    ranked = ranking([20, 21], [[30, 31, 32], [40], [50, 51]], pool, base=7)
    running = text([1, 2, 3, 4], pool, generated=[5, 6])
    plan = StepPlan([new], [running], [RankPiece(ranked, 0, 3)])
    batch = pack(plan, None, 4)
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 6, 30, 31, 50]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 2, 3, 2]
    assert batch.vector_bases.tolist() == [3] * 5 + [7] * 2 + [0] + [7] * 3
    assert batch.write_blocks.tolist() == [0, 0, 0, 0, 1, 2, 2, 4]
    assert batch.write_offsets.tolist() == [0, 1, 2, 3, 0, 0, 1, 1]
    assert batch.output_rows.tolist() == [4, 6, 7, 8, 9, 10]
    assert batch.prefill.lengths == (5, 2)
    assert batch.branch.own.lengths == (2, 1)
    assert (batch.prefill_rows, batch.cached_rows) == (7, 8)


def test_a_query_computed_before_is_not_computed_again():
    pool = BlockPool(20, 4)
    ranked = ranking([20, 21, 22], [[30, 31], [40, 41, 42]], pool)
    ranked.query_hidden = torch.zeros(4)
    batch = pack(StepPlan([], [], [RankPiece(ranked, 1, 2)]), None, 4)
    assert batch.token_ids.tolist() == [40, 41]
    assert batch.positions.tolist() == [3, 4]
    assert batch.prefill is None
    assert batch.cached_rows == 0
    assert batch.branch.prefixes[0][1] == 3


def test_a_sequence_without_blocks_is_a_mistake_of_ours():
    sequence = GenerateSequence(5, [1], SamplingParams(9), StopMatcher(()), 0, 0)
    with pytest.raises(RuntimeError, match="request 5"):
        pack(StepPlan([sequence], [], []), None, 4)


def test_scores_pair_each_token_with_the_row_before_it(tiny_model):
    model = load_model(ModelDirectory.open(tiny_model), "fp32")
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 32, generator=generator)
    rows = torch.randn(5, 32, generator=generator)
    # Two rows for [5, 6, 7], none for [8], one for [9, <vector>], two for [600, 3, 4].
    documents = [[[5, 6, 7], [8], [9, 512]], [[600, 3, 4]]]
    with torch.inference_mode():
        found = score_documents(model, queries, rows, documents)
        every = -model.logits(torch.cat((queries, rows))).double().log_softmax(-1).numpy()
    expected = [
        [every[[0, 2, 3], [5, 6, 7]], every[[0], [8]], every[[0], [9]]],
        [every[[5, 6], [3, 4]]],
    ]
    for group, expected_group in zip(found, expected, strict=True):
        for nll, values in zip(group, expected_group, strict=True):
            np.testing.assert_allclose(nll, values, rtol=1e-5)
