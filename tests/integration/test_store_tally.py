"""What a process has landed is counted once, by the process that committed it."""

import pytest

from nightjar.jobs.errors import StoreError
from nightjar.jobs.records import JsonObject, NewResult
from nightjar.jobs.store import Store
from tests.jobs import planned

pytestmark = pytest.mark.one_database


def result(request_id: int, body: JsonObject | None = None) -> NewResult:
    return NewResult(request_id, 200, body or {}, None, 5, 7, 8, 1)


def landed(store: Store) -> dict[str, int]:
    return {name: number for name, number in store.database.tally.read().items() if number}


def test_results_are_counted_when_they_are_committed(store: Store) -> None:
    _, (ref,) = planned(store, 3, each=3)
    assert landed(store) == {}
    batch = store.leases.claim(ref.id, ref.epoch, "w", "")
    assert batch is not None
    results = [result(one.id) for one in batch.requests]
    assert store.leases.finish(ref.id, ref.epoch, "w", results)
    assert landed(store) == {
        "completed": 3,
        "prompt_tokens": 15,
        "completion_tokens": 21,
        "requested_tokens": 24,
        "saved_tokens": 3,
    }
    assert not store.leases.finish(ref.id, ref.epoch, "w", results)
    assert landed(store)["completed"] == 3


def test_a_transaction_that_fails_counts_nothing(store: Store) -> None:
    _, (ref,) = planned(store, 2, each=2)
    batch = store.leases.claim(ref.id, ref.epoch, "w", "")
    assert batch is not None
    bad = [result(one.id, {"number": float("nan")}) for one in batch.requests]
    with pytest.raises(StoreError):
        store.leases.finish(ref.id, ref.epoch, "w", bad)
    assert landed(store) == {}


def test_cancelled_requests_are_counted_too(store: Store) -> None:
    job_id, _ = planned(store, 4, each=2)
    store.stopping.cancel(job_id)
    store.stopping.finish()
    assert landed(store) == {"cancelled": 4}
