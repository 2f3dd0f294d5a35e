"""Reading back: pages in row order, and prompt vectors by name."""

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from nightjar.jobs.errors import StoreError, UnknownJobError
from nightjar.jobs.records import NewResult
from nightjar.jobs.states import MicroBatchState
from nightjar.jobs.store import Store, results
from nightjar.jobs.store.result_rows import sizes_after
from tests.jobs import planned, submit
from tests.outcomes import answers, claim, compute

pytestmark = pytest.mark.one_database


@pytest.fixture
def job_id(store: Store) -> str:
    """Seven rows; those with an odd index failed. They landed from the last to the first."""
    job_id, refs = planned(store, 7)
    for ref in reversed(refs):
        claimed = claim(store, ref)
        (result,) = answers(claimed)
        if claimed.requests[0].index % 2:
            result = NewResult.failure(result.request_id, "refused", "odd")
        store.leases.finish(ref.id, 0, "worker", [result])
    return job_id


@pytest.mark.parametrize(
    ("outcome", "indexes"),
    [("all", [0, 1, 2, 3, 4, 5, 6]), ("succeeded", [0, 2, 4, 6]), ("failed", [1, 3, 5])],
)
def test_pages(store: Store, job_id: str, outcome, indexes: list[int]) -> None:
    first = store.results.read(job_id, limit=2, outcome=outcome)
    assert [item.index for item in first] == indexes[:2]
    rest = store.results.read(job_id, after_index=first[-1].index, outcome=outcome)
    assert [item.index for item in rest] == indexes[2:]
    streamed = store.results.iterate(job_id, outcome=outcome, page_size=2)
    assert [item.index for item in streamed] == indexes


def test_results_stream_in_small_pages(
    store: Store, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[int] = []

    def counted(*arguments: Any):
        sizes = sizes_after(*arguments)
        pages.append(len(sizes))
        return sizes

    monkeypatch.setattr(results, "sizes_after", counted)
    assert len(list(store.results.iterate(job_id, page_size=3))) == 7
    assert max(pages) <= 4  # one more shows that there is a next page
    assert len(pages) >= 3


def test_the_lines_and_ids_of_results(store: Store, job_id: str) -> None:
    for item in store.results.read(job_id):
        assert (item.line, item.custom_id) == (item.index + 1, f"row-{item.index}")


def test_pages_of_a_running_job_hold_what_has_landed(store: Store) -> None:
    job_id, refs = planned(store, 3)
    compute(store, refs[1])
    assert [item.index for item in store.results.iterate(job_id)] == [1]
    counts = store.jobs.get_in_detail(job_id)[1]
    expected = dict.fromkeys(MicroBatchState, 0)
    assert counts == expected | {MicroBatchState.DONE: 1, MicroBatchState.READY: 2}


def test_jobs_newest_first_in_pages(store: Store) -> None:
    ids = [submit(store, [{"prompt": "a"}]) for _ in range(3)][::-1]
    assert sorted(item.id for item in store.jobs.newest()) == sorted(ids)
    listed = [item.id for item in store.jobs.newest()]
    assert listed == sorted(ids, reverse=True)
    assert [item.id for item in store.jobs.newest(limit=2, after=listed[0])] == listed[1:]
    assert [store.jobs.get(id_).id for id_ in ids] == ids


def test_an_unknown_job(store: Store) -> None:
    with pytest.raises(UnknownJobError):
        store.jobs.get("job_nothing")
    assert store.results.read("job_nothing") == []


def put(store: Store, name: str, data: bytes):
    return store.vectors.put(name, data, 2, 8, hashlib.sha256(data).hexdigest())


def test_prompt_vectors_have_versions(store: Store) -> None:
    assert store.vectors.get("tone") is None
    first = put(store, "tone", b"one\x00")
    assert (first.version, first.length, first.width) == (1, 2, 8)
    assert put(store, "tone", b"one\x00") == first
    second = put(store, "tone", b"two")
    assert second.version == 2
    assert store.vectors.get("tone") == second
    assert store.vectors.get("tone", 1) == first
    assert store.vectors.get("tone", 3) is None
    # The name stands for what was put last, also when that was an older version's bytes.
    assert put(store, "tone", b"one\x00").version == 3
    other = put(store, "style", b"one\x00")
    assert store.vectors.get("style") == other == replace(first, name="style")


def test_prompt_vectors_with_a_wrong_digest_are_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="sha256"):
        store.vectors.put("tone", b"one", 2, 8, "0" * 64)
