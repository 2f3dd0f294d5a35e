"""Rankings: what documents share, and which of them need no more work."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nightjar.gpu_worker.engine import RankRequest, ranking, validation
from nightjar.gpu_worker.engine.adapters import Tuning
from nightjar.gpu_worker.engine.ranking import (
    MIN_SAVED_ROWS,
    Document,
    RankJob,
    RankPart,
    apart_if_long,
    shared_beginnings,
)
from nightjar.gpu_worker.engine.sequence import Prefix
from nightjar.gpu_worker.models import Decoder
from tests.engines import VOCAB, block_bytes, ids, random_ids, run

pytestmark = pytest.mark.usefixtures("one_thread")
beginnings = st.lists(st.integers(0, 2), max_size=30)
documents_alike = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=6)), min_size=1
)


@pytest.fixture(scope="module")
def model(any_model):
    return any_model


def rank(model, token_bytes, *requests, **config):
    results = run(model, token_bytes, requests, **config)
    return [results[request.request_id] for request in requests]


def winners(scores, count):
    best = sorted((score, index) for index, score in enumerate(scores) if score is not None)
    return [(index, score) for score, index in best[:count]]


@given(st.lists(beginnings, min_size=4, max_size=4), documents_alike, st.integers(0, 40))
def test_every_document_stands_in_one_group_and_begins_with_what_it_shares(kinds, ends, longest):
    documents = [kinds[kind] * 3 + end for kind, end in ends]
    groups = shared_beginnings(documents, longest)
    assert sorted(index for _, members in groups for index in members) == list(range(len(ends)))
    for length, members in groups:
        assert length <= longest
        assert len({tuple(documents[index][:length]) for index in members}) == 1
        assert all(len(documents[index]) > length for index in members)
        if length:
            assert (len(members) - 1) * length > MIN_SAVED_ROWS


def test_groups_form_at_the_level_that_saves_most():
    long, short = list(range(60)), list(range(4))
    documents = [[*long, i] for i in range(4)] + [[*short, 900 + i] for i in range(3)]
    assert shared_beginnings(documents, 1000) == [(0, [4, 5, 6]), (60, [0, 1, 2, 3])]
    assert shared_beginnings([[*long, 1], [*long, 2]], 1000) == [(60, [0, 1])]
    assert shared_beginnings([[1, 2], [1, 3]], 1000) == [(0, [0, 1])]
    assert shared_beginnings([long, long, long], 1000) == [(59, [0, 1, 2])]


def test_sharing_changes_no_score(model, token_bytes):
    """Up to rounding: what is shared is summed in another order than it would be alone."""
    rng = np.random.default_rng(0)
    beginning = random_ids(rng, 40)
    documents = [beginning + random_ids(rng, n) for n in (1, 5, 17, 3)]
    documents += [random_ids(rng, n) for n in (1, 6)]
    query = random_ids(rng, 21)
    together = RankRequest(0, query, documents)
    alone = [RankRequest(1 + i, query, [document]) for i, document in enumerate(documents)]
    found, *expected = rank(model, token_bytes, together, *alone)
    assert found.token_counts == [len(document) for document in documents]
    tolerance = 1e-5 if model.dtype == torch.float32 else 2e-2
    np.testing.assert_allclose(
        found.mean_nll, [result.mean_nll[0] for result in expected], rtol=tolerance
    )


def test_sharing_saves_rows(model, token_bytes, monkeypatch):
    rng = np.random.default_rng(1)
    beginning, query = random_ids(rng, 40), random_ids(rng, 32)
    rows = []
    forward = Decoder.forward
    monkeypatch.setattr(
        Decoder,
        "forward",
        lambda self, batch, cache: rows.append(len(batch.token_ids)) or forward(self, batch, cache),
    )
    rank(model, token_bytes, RankRequest(0, query, [beginning + random_ids(rng, 3)] * 10))
    # The query with what all documents begin with; one token is left to each, and not fed.
    assert rows == [32 + 42]


def test_a_vector_in_the_beginning_is_read_and_not_scored(model, token_bytes):
    rng = np.random.default_rng(2)
    beginning = [*random_ids(rng, 20), VOCAB, *random_ids(rng, 20)]
    documents = [beginning + random_ids(rng, 4) for _ in range(4)]
    request = RankRequest(0, [5, 6], documents, "v")
    results = run(model, token_bytes, [request], {"v": torch.ones(1, 32)})
    assert results[0].token_counts == [44] * 4


@st.composite
def rankings(draw):
    """A query, documents that may begin alike, and how many of the best are asked for."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    kinds = [random_ids(rng, draw(st.integers(0, 40))) for _ in range(2)]
    documents = [
        kinds[draw(st.integers(0, 1))] + random_ids(rng, draw(st.integers(1, 40)))
        for _ in range(draw(st.integers(1, 14)))
    ]
    documents += draw(st.lists(st.sampled_from(documents), max_size=2))
    return random_ids(rng, draw(st.integers(1, 40))), documents, draw(st.integers(1, 6))


@settings(max_examples=25, deadline=None)
@given(ranking=rankings(), rows=st.sampled_from([16, 100, 2048]))
def test_pruning_finds_the_same_winners_with_the_same_scores(model, token_bytes, ranking, rows):
    query, documents, top_n = ranking
    whole, pruned = (
        rank(model, token_bytes, RankRequest(0, query, documents, top_n=count), max_step_tokens=r)[
            0
        ]
        for count, r in ((None, 2048), (top_n, rows))
    )
    assert winners(pruned.mean_nll, top_n) == winners(whole.mean_nll, top_n)
    assert pruned.token_counts == whole.token_counts
    for found, expected in zip(pruned.mean_nll, whole.mean_nll, strict=True):
        assert found in (None, expected)


def test_pruning_drops_what_cannot_win_where_documents_differ_widely(
    model, token_bytes, monkeypatch
):
    """The tiny model finds all tokens alike; here those of each further 128 cost more."""
    original = Decoder.token_nll

    def spread(self, hidden, rows, targets):
        return original(self, hidden, rows, targets).add_((targets // 128 * 40).float())

    monkeypatch.setattr(Decoder, "token_nll", spread)
    dropped = 0
    for seed in range(25):
        rng = np.random.default_rng(seed)
        beginning = random_ids(rng, 30) if seed % 2 else []
        kinds = [128 * int(kind) for kind in rng.integers(0, 4, 12)]
        ends = [2 + kind + rng.integers(0, 126, rng.integers(1, 40)) for kind in kinds]
        documents = [beginning * (i % 3 > 0) + end.tolist() for i, end in enumerate(ends)]
        query, top_n = random_ids(rng, 9), 1 + seed % 4
        (whole,) = rank(model, token_bytes, RankRequest(0, query, documents))
        asked = RankRequest(0, query, documents, top_n=top_n)
        (pruned,) = rank(model, token_bytes, asked, max_step_tokens=100)
        assert winners(pruned.mean_nll, top_n) == winners(whole.mean_nll, top_n)
        for found, expected in zip(pruned.mean_nll, whole.mean_nll, strict=True):
            assert found in (None, expected)
        dropped += pruned.mean_nll.count(None)
    assert dropped > 100  # of 300


@pytest.fixture
def short_pieces(monkeypatch):
    """Documents of more than 24 tokens are long."""
    for module in (ranking, validation):
        monkeypatch.setattr(module, "LONG_DOCUMENT", 24)


@pytest.fixture
def step_rows(monkeypatch):
    """The rows of every forward pass."""
    rows, forward = [], Decoder.forward

    def seen(self, batch, cache):
        rows.append(batch.token_ids.shape[0])
        return forward(self, batch, cache)

    monkeypatch.setattr(Decoder, "forward", seen)
    return rows


def long_documents():
    rng = np.random.default_rng(0)
    return [random_ids(rng, n) for n in (70, 24, 25, 3, 90)]


@pytest.mark.usefixtures("short_pieces")
def test_no_step_goes_past_its_rows_for_a_long_document(model, token_bytes, step_rows):
    asked = RankRequest(0, ids(9), long_documents())
    (result,) = rank(model, token_bytes, asked, max_step_tokens=32)
    assert max(step_rows) <= 32
    assert sum(step_rows) > 200
    (whole,) = rank(model, token_bytes, asked)
    assert result == whole  # to the last bit


def test_a_long_document_scores_as_in_one_piece(model, token_bytes, step_rows, monkeypatch):
    asked = RankRequest(0, ids(9), long_documents())
    (one_piece,) = rank(model, token_bytes, asked, max_step_tokens=64)
    assert max(step_rows) > 64
    for module in (ranking, validation):
        monkeypatch.setattr(module, "LONG_DOCUMENT", 24)
    (pieces,) = rank(model, token_bytes, asked, max_step_tokens=64)
    near = 1e-5 if model.dtype == torch.float32 else 1e-3
    assert pieces.mean_nll == pytest.approx(one_piece.mean_nll, rel=near)
    assert pieces.token_counts == one_piece.token_counts == [70, 24, 25, 3, 90]


@pytest.mark.usefixtures("short_pieces")
def test_long_documents_one_after_another_in_a_cache_for_one(model, token_bytes):
    """100 tokens are 4 blocks; the best are asked for, so that all are looked at."""
    cache = 4 * block_bytes(model)
    for top_n in (None, 2):
        asked = RankRequest(0, ids(9), long_documents(), top_n=top_n)
        (tight,) = rank(model, token_bytes, asked, kv_cache_bytes=cache)
        assert tight == rank(model, token_bytes, asked)[0]
    (refused,) = rank(model, token_bytes, asked, kv_cache_bytes=cache // 2)
    assert refused.code == "cache_exceeded"
    assert "needs 3 cache blocks of 32 tokens, but the cache has 2" in refused.message


def test_groups_of_long_documents():
    documents = [[1] * 600, [2] * 512, [*[1] * 300, 3], [*[4] * 513]]
    groups = [(0, [1, 3]), (300, [0, 2])]
    assert list(apart_if_long(groups, documents)) == [(0, [1]), (512, [3]), (300, [0, 2])]
    assert list(apart_if_long([(0, [3])], documents)) == [(512, [3])]


def test_pruning_leaves_hopeless_documents_alone(model, token_bytes, monkeypatch):
    """A model that finds some first tokens next to impossible."""
    original = Decoder.token_nll

    def decided(self, hidden, rows, targets):
        return original(self, hidden, rows, targets).add_((targets >= 256) * 500.0)

    monkeypatch.setattr(Decoder, "token_nll", decided)
    rng = np.random.default_rng(0)
    documents = [[400 + i, *(random_ids(rng, 30))] for i in range(20)]
    documents += [[2 + i, *rng.integers(2, 256, 30).tolist()] for i in range(3)]
    (result,) = rank(model, token_bytes, RankRequest(0, [3, 4], documents, top_n=3))
    assert result.mean_nll[:20] == [None] * 20
    assert None not in result.mean_nll[20:]


def document(index, tokens=20, **known):
    found = Document(index, [1] * tokens, tokens)
    for name, value in known.items():
        setattr(found, name, value)
    return found


def job(documents, top_n):
    part = RankPart(Prefix([1], Tuning(), [], 1, 1), documents)
    request = RankRequest(0, [1], [d.tokens for d in documents], top_n=top_n)
    return RankJob(request, 0, [part])


def test_a_bound_that_equals_the_last_winner_is_no_reason_to_drop():
    ranking = job([document(0), document(1, depth=1), document(2, depth=1)], 1)
    first = next(iter(ranking.candidates(ranking.parts)))
    ranking.add(first, np.full(1, 4.0))
    for place, known in ((0, 40.0), (1, 40.0), (2, 40.1)):
        ranking.parts[0].documents[place].known = known
        ranking.parts[0].documents[place].depth = 4
    (look,) = ranking.candidates(ranking.parts)
    assert (look.document.index, look.depth) == (0, 20)
    ranking.add(look, np.full(20, 2.0))
    ranking.prune()
    assert [d.index for d in ranking.waiting] == [1]


def test_looks_go_deeper_by_four():
    depths = [document(0, 200, depth=depth).next_depth for depth in (0, 1, 4, 16, 64)]
    assert depths == [1, 4, 16, 64, 200]
    assert [document(0, tokens, depth=1).next_depth for tokens in (7, 8)] == [7, 4]


def test_nothing_is_dropped_without_as_many_results_as_are_wanted():
    ranking = job([document(i, depth=1, known=100.0 * i) for i in range(3)], 2)
    ranking.prune()
    assert len(ranking.waiting) == 3
    assert [look.document.index for look in ranking.candidates(ranking.parts)] == [0, 1]
