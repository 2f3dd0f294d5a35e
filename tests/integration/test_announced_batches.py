"""Events of batches: one each, when the result files exist; none of a single call."""

import json
from typing import Any

import pytest
import sqlalchemy as sa

from nightjar.jobs.batch_records import Batch
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import (
    EncodedRequest,
    JobLimits,
    NewJob,
    NewMicroBatch,
    PlannedCall,
)
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.store.submission import new_job_id
from nightjar.jobs.store.webhook_tables import webhook_delivery
from tests.batches import (
    completions,
    compute_all,
    finalize_all,
    ingest,
    landed,
    lines_of,
    make,
    read_all,
)
from tests.jobs import submit
from tests.outcomes import answers, claim
from tests.processes import completion_line
from tests.webhooks import add, of, take


def told(store: Store) -> tuple[str, dict[str, Any]]:
    """The type and the data of the only event that waits."""
    (due,) = take(store)
    event = json.loads(due.body)
    return event["type"], event["data"]


def data(batch: Batch, *, completed: int = 0, failed: int = 0, cancelled: int = 0) -> object:
    total = completed + failed + cancelled
    counts = {"total": total, "completed": completed, "failed": failed, "cancelled": cancelled}
    return {"id": batch.id, "counts": counts}


@pytest.mark.parametrize("refused", [0, 2, 4])
def test_a_batch_is_announced_once_when_its_files_exist(store: Store, refused: int) -> None:
    webhook = add(store)
    batch = landed(store, completions(4))
    compute_all(store, batch, refused=refused)
    assert store.jobs.get(batch.job_id).is_over
    assert of(store, webhook) == [], "its result files are not there yet"
    (counted,) = store.batch_work.to_finalize(9)
    finalize_all(store)
    assert not store.batch_work.finalize(counted)
    assert told(store) == ("batch.completed", data(batch, completed=4 - refused, failed=refused))
    assert [one.job_id for one in of(store, webhook)] == [batch.job_id]


def test_a_batch_of_bad_lines_alone_is_announced_once(store: Store) -> None:
    webhook = add(store)
    batch = landed(
        store, [completion_line(f"row-{n}", prompt="a", max_tokens=-1) for n in range(2)]
    )
    assert store.jobs.get(batch.job_id).state == "failed"
    assert of(store, webhook) == []
    finalize_all(store)
    assert told(store) == ("batch.completed", data(batch, failed=2))


def test_a_cancelled_batch(store: Store) -> None:
    webhook = add(store)
    batch = landed(store, completions(3))
    store.batches.cancel(batch.id, batch.tenant)
    store.stopping.finish()
    assert of(store, webhook) == []
    finalize_all(store)
    assert told(store) == ("batch.cancelled", data(batch, cancelled=3))


def test_an_expired_batch(store: Store) -> None:
    webhook = add(store)
    batch = landed(store, completions(3), completion_window_s=1e-6)
    assert store.stopping.expire() == [batch.job_id]
    store.stopping.finish()
    assert of(store, webhook) == []
    finalize_all(store)
    kind, about = told(store)
    assert (kind, about["id"]) == ("batch.expired", batch.id)


def test_batches_that_are_cancelled_before_they_are_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its event, also where one transaction does not end them all."""
    monkeypatch.setattr("nightjar.jobs.store.batch_work._CANCELLED_AT_ONCE", 2)
    webhook, stranger = add(store), add(store, tenant="stranger")
    made = [make(store, b"{}\n") for _ in range(3)]
    for batch in made:
        store.batches.cancel(batch.id, batch.tenant)
    assert store.batch_work.end_cancelled() == 3
    assert store.batch_work.end_cancelled() == 0
    with store.database.reading() as connection:
        events = [
            json.loads(body) for body in connection.scalars(sa.select(webhook_delivery.c.body))
        ]
    assert {event["type"] for event in events} == {"batch.cancelled"}
    assert sorted(event["data"]["id"] for event in events) == sorted(batch.id for batch in made)
    assert len(of(store, webhook)) == 3
    assert of(store, stranger) == []


def test_a_batch_whose_file_cannot_be_used(store: Store) -> None:
    webhook = add(store)
    batch = make(store, lines_of(completions(2)))
    read_all(ingest(store, limits=JobLimits(rows=1)))
    assert store.batches.get(batch.id, batch.tenant).status == "failed"
    assert told(store) == ("batch.failed", data(batch))
    assert not store.batch_work.fail(batch.job_id, [])
    assert len(of(store, webhook)) == 1


def test_the_event_is_in_the_transaction_that_ends_the_batch(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    webhook = add(store)
    batch = landed(store, completions(1))
    compute_all(store, batch)
    (counted,) = store.batch_work.to_finalize(9)
    name = "nightjar.jobs.store.announcing.event_body"
    monkeypatch.setattr(name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.batch_work.finalize(counted)
    assert store.batches.get(batch.id, batch.tenant).status == "finalizing"
    assert of(store, webhook) == []
    monkeypatch.undo()
    finalize_all(store)
    assert len(of(store, webhook)) == 1


def test_a_batch_without_webhook_costs_no_statement(store: Store) -> None:
    add(store, tenant="stranger")
    batch = landed(store, completions(1))
    compute_all(store, batch)
    said: list[str] = []
    sa.event.listen(
        store.database.engine,
        "before_cursor_execute",
        lambda c, cursor, statement, *_: said.append(statement),
    )
    finalize_all(store)
    assert store.batches.get(batch.id, batch.tenant).status == "completed"
    (about,) = (statement for statement in said if "webhook" in statement)
    assert about.startswith("UPDATE batch"), "the statement that ends the batch asks by the way"


def test_a_single_call_is_not_announced(store: Store) -> None:
    webhook = add(store)
    body = validate_body(RequestKind.GENERATE, {"prompt": "hello", "max_tokens": 4})
    encoded = EncodedRequest(0, [[1, 2, 3]])
    micro_batch = NewMicroBatch(RequestKind.GENERATE, 32, [0], 7)
    plan = PlannedCall(encoded, micro_batch, "f" * 64)
    job_id, new = new_job_id(), NewJob("tiny", completion_window_s=60)
    ref = store.live.submit(new, job_id, RequestKind.GENERATE, body, plan)
    assert ref is not None
    claimed = claim(store, ref)
    assert store.leases.finish(ref.id, ref.epoch, "worker", answers(claimed), live=True)
    assert store.jobs.get(job_id).state == "completed"
    store.stopping.cancel(submit(store, [{"prompt": "a"}]))
    assert [one.type for one in of(store, webhook)] == ["job.cancelled"], "the job's alone"
