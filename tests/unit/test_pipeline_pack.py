"""Packing: every request once, within the budgets, kin together, lengths alike."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nightjar.jobs.records import EncodedRequest
from nightjar.jobs.states import RequestKind
from nightjar.pipeline.planning.pack import MOST_ADAPTERS, PREFIX_TOKENS, Packable, pack
from nightjar.pipeline.queue.queues import BUCKETS, LARGEST_BUCKET, SMALLEST_BUCKET, bucket_for

GENERATE, RANK = RequestKind.GENERATE, RequestKind.RANK


def packable(
    number: int, segments: list[list[int]], kind: RequestKind = GENERATE, max_tokens: int = 8
) -> Packable:
    return Packable(EncodedRequest(number, segments), kind, max_tokens if kind is GENERATE else 0)


@st.composite
def piles(draw: st.DrawFn) -> list[Packable]:
    ids = st.lists(st.integers(0, 3), min_size=1, max_size=80)
    pile = []
    for number in range(draw(st.integers(0, 40))):
        kind = draw(st.sampled_from([GENERATE, RANK]))
        documents = draw(st.lists(ids, min_size=1, max_size=4)) if kind is RANK else []
        pile.append(packable(number, [draw(ids), *documents], kind, draw(st.integers(1, 50))))
    return pile


@given(piles(), st.integers(1, 10), st.integers(1, 400))
def test_every_request_once_and_within_the_budgets(
    pile: list[Packable], most_requests: int, most_tokens: int
) -> None:
    by_id = {item.request.id: item for item in pile}
    batches = pack(pile, most_requests=most_requests, most_tokens=most_tokens)
    assert Counter(i for batch in batches for i in batch.request_ids) == Counter(list(by_id))
    for batch in batches:
        members = [by_id[i] for i in batch.request_ids]
        assert {member.kind for member in members} == {batch.kind}
        assert len(members) <= most_requests
        assert batch.tokens == sum(member.cost for member in members)
        assert batch.tokens <= most_tokens or len(members) == 1
        assert batch.bucket in BUCKETS
        assert all(member.length <= batch.bucket for member in members)


@given(piles(), st.integers(1, 10), st.integers(1, 400))
def test_a_batch_ends_where_the_next_request_finds_no_room(
    pile: list[Packable], most_requests: int, most_tokens: int
) -> None:
    """Otherwise batches of one request each would be within the budgets, too."""
    cost = {item.request.id: item.cost for item in pile}
    batches = pack(pile, most_requests=most_requests, most_tokens=most_tokens)
    for batch, following in pairwise(batches):
        if (batch.kind, batch.bucket) == (following.kind, following.bucket):
            is_full = len(batch.request_ids) == most_requests
            assert is_full or batch.tokens + cost[following.request_ids[0]] > most_tokens
    kept = {(batch.kind, batch.bucket) for batch in batches}
    runs = 1 + sum(
        (one.kind, one.bucket) != (other.kind, other.bucket) for one, other in pairwise(batches)
    )
    assert len(kept) == (runs if batches else 0)  # all of a bucket stand together


def test_a_batch_is_filled_to_its_budgets() -> None:
    pile = [packable(n, [[n] * 8], max_tokens=2) for n in range(10)]
    by_requests = pack(pile, most_requests=4, most_tokens=1_000)
    assert [len(batch.request_ids) for batch in by_requests] == [4, 4, 2]
    by_tokens = pack(pile, most_requests=100, most_tokens=30)
    assert [batch.tokens for batch in by_tokens] == [30, 30, 30, 10]


def test_lengths_of_a_batch_are_alike_when_nothing_is_shared() -> None:
    pile = [packable(n, [[n] * length]) for n, length in enumerate([5, 500, 7, 480, 30, 33])]
    batches = pack(pile, most_requests=64, most_tokens=10_000)
    assert sorted((batch.bucket, sorted(batch.request_ids)) for batch in batches) == [
        (32, [0, 2, 4]),
        (64, [5]),
        (512, [1, 3]),
    ]


def test_requests_with_a_common_prefix_travel_together() -> None:
    system = list(range(PREFIX_TOKENS))
    other = list(range(100, 100 + PREFIX_TOKENS))
    pile = [
        packable(n, [(system if n % 2 else other) + [n] * (1 + 40 * (n % 3))]) for n in range(12)
    ]
    batches = pack(pile, most_requests=6, most_tokens=10_000)
    assert [sorted(n % 2 for n in batch.request_ids) for batch in batches] in (
        [[0] * 6, [1] * 6],
        [[1] * 6, [0] * 6],
    )


def test_rankings_of_one_query_travel_together() -> None:
    queries = [list(range(start, start + PREFIX_TOKENS)) for start in (0, 100)]
    # Their documents have nothing in common, and lengths of two buckets.
    pile = [
        packable(n, [queries[n % 2], [1_000 + n] * (8 + 40 * (n % 3))], RANK) for n in range(12)
    ]
    batches = pack(pile, most_requests=6, most_tokens=10_000)
    assert sorted(sorted(n % 2 for n in batch.request_ids) for batch in batches) == [
        [0] * 6,
        [1] * 6,
    ]


def test_buckets_are_powers_of_two_that_hold_the_length() -> None:
    assert (BUCKETS[0], BUCKETS[-1]) == (SMALLEST_BUCKET, LARGEST_BUCKET) == (32, 1 << 20)
    assert [bucket_for(n) for n in (0, 1, 32, 33, 64, 65, 1000)] == [32, 32, 32, 64, 64, 128, 1024]


def test_a_short_query_does_not_pull_rankings_into_the_longest_ones_bucket() -> None:
    lengths = {0: SMALLEST_BUCKET // 2, 1: 4 * SMALLEST_BUCKET}
    query = [1, 2, 3]
    pile = [packable(id_, [query, [7] * length], RANK, 1) for id_, length in lengths.items()]
    batches = pack(pile, most_requests=8, most_tokens=1 << 20)
    buckets = {id_: batch.bucket for batch in batches for id_ in batch.request_ids}
    assert buckets == {id_: bucket_for(3 + length) for id_, length in lengths.items()}


def test_a_micro_batch_names_few_adapters_and_their_requests_stay_together() -> None:
    pile = [
        Packable(EncodedRequest(n, [[n % 3, 7]], adapter=f"a{n % 40:02}@1"), GENERATE, 4)
        for n in range(160)
    ]
    named = [
        [f"a{id_ % 40:02}" for id_ in batch.request_ids]
        for batch in pack(pile, most_requests=1000, most_tokens=100_000)
    ]
    assert [len(set(one)) for one in named] == [
        MOST_ADAPTERS,
        MOST_ADAPTERS,
        40 - 2 * MOST_ADAPTERS,
    ]
    assert all(one == sorted(one) for one in named)
    assert sum(map(len, named)) == 160
