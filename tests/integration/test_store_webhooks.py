"""Events in the store: written with the end of a job, claimed, retried, seen and deleted."""

import json

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.errors import (
    LifecycleError,
    TooManyWebhooksError,
    UnknownWebhookError,
)
from nightjar.jobs.events import (
    Attempt,
    EventCounts,
    EventType,
    Subject,
    end_event,
)
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import NewJob, NewRequest, NewResult, RejectedRow
from nightjar.jobs.states import JobState, RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.store.announcing import announce
from nightjar.jobs.store.webhook_tables import webhook_delivery
from nightjar.jobs.store.webhooks import MOST_OF_TENANT
from tests.jobs import planned, submit
from tests.outcomes import claim, compute
from tests.webhooks import add, finished, of, take

pytestmark = pytest.mark.one_database


def test_the_end_of_a_job_is_an_event_with_counts_and_nothing_else(store: Store) -> None:
    webhook = add(store)
    job_id, (first, second) = planned(store, 2)
    compute(store, first)
    assert of(store, webhook) == []
    claimed = claim(store, second)
    failure = NewResult.failure(claimed.requests[0].id, "refused", "no good")
    store.leases.finish(second.id, 0, "worker", [failure])
    (delivery,) = of(store, webhook)
    assert (delivery.type, delivery.job_id, delivery.state) == ("job.completed", job_id, "waiting")
    (due,) = take(store)
    body = json.loads(due.body)
    assert body.pop("created_at") == int(delivery.created_at.timestamp())
    assert body == {
        "id": delivery.event_id,
        "object": "event",
        "type": "job.completed",
        "data": {
            "id": job_id,
            "counts": {"total": 2, "completed": 1, "failed": 1, "cancelled": 0},
        },
    }


def test_every_end_is_an_event(store: Store) -> None:
    webhook = add(store)
    store.stopping.cancel(submit(store, [{"prompt": "a"}]))
    rejected = RejectedRow(0, 1, "a", "invalid", "no good")
    with store.jobs.submit(NewJob("tiny")) as submission:
        submission.add([rejected])
    with store.jobs.submit(NewJob("tiny", completion_window_s=-1.0)) as submission:
        submission.add([RejectedRow(0, 1, "a", "invalid", "no"), _row(1)])
    store.stopping.expire()
    store.stopping.finish()
    assert [one.type for one in reversed(of(store, webhook))] == [
        "job.cancelled",
        "job.failed",
        "job.expired",
    ]


def _row(index: int) -> NewRequest:
    body = validate_body(RequestKind.GENERATE, {"prompt": "a"})
    return NewRequest(index, index + 1, f"row-{index}", RequestKind.GENERATE, body)


def test_a_job_that_was_retried_ends_again(store: Store) -> None:
    webhook = add(store)
    job_id, (ref,) = planned(store, 1)
    claimed = claim(store, ref)
    fault = NewResult.failure(claimed.requests[0].id, "internal_error", "oh", status=500)
    store.leases.finish(ref.id, 0, "worker", [fault])
    assert store.retries.retry(job_id) == 1
    store.stopping.cancel(job_id)
    first, second = reversed(of(store, webhook))
    assert (first.type, second.type) == ("job.failed", "job.cancelled")
    assert first.event_id != second.event_id


@pytest.mark.parametrize(
    ("subject", "state", "name"),
    [
        (Subject.BATCH, JobState.COMPLETED, "batch.completed"),
        (Subject.BATCH, JobState.COMPLETED_WITH_FAILURES, "batch.completed"),
        (Subject.BATCH, JobState.FAILED, "batch.completed"),
        (Subject.BATCH, JobState.EXPIRED, "batch.expired"),
        (Subject.BATCH, JobState.CANCELLED, "batch.cancelled"),
        (Subject.JOB, JobState.COMPLETED_WITH_FAILURES, "job.completed"),
        (Subject.JOB, JobState.FAILED, "job.failed"),
    ],
)
def test_one_place_names_the_events(subject: Subject, state: JobState, name: str) -> None:
    assert end_event(subject, state) == name


def test_a_batch_is_announced_by_the_id_that_its_caller_knows(store: Store) -> None:
    webhook = add(store, EventType.BATCH_FAILED)
    counts: EventCounts = {"total": 0, "completed": 0, "failed": 0, "cancelled": 0}

    def work(connection: Connection) -> None:
        for kind in (EventType.BATCH_FAILED, EventType.BATCH_EXPIRED):
            announce(connection, "default", kind, "job_1", "batch_1", counts)

    store.database.write(work)
    (delivery,) = of(store, webhook)
    assert (delivery.type, delivery.job_id) == ("batch.failed", "job_1")
    (claimed,) = take(store)
    assert json.loads(claimed.body)["data"]["id"] == "batch_1"


def test_a_job_that_goes_on_has_no_event() -> None:
    with pytest.raises(LifecycleError):
        end_event(Subject.JOB, JobState.RUNNING)


def test_only_webhooks_of_the_tenant_that_ask_and_are_on_get_the_event(store: Store) -> None:
    asks = add(store, EventType.JOB_COMPLETED, EventType.JOB_FAILED)
    other = add(store, EventType.JOB_FAILED)
    off = add(store)
    stranger = add(store, tenant="stranger")
    store.webhooks.set_enabled("default", off.id, enabled=False)
    second = add(store)
    finished(store)
    counts = [len(of(store, one)) for one in (asks, other, off, stranger, second)]
    assert counts == [1, 0, 0, 0, 1]
    (one,), (same) = of(store, asks), of(store, second)
    assert one.event_id == same[0].event_id
    assert one.id != same[0].id


def test_a_job_without_webhook_costs_no_statement(store: Store) -> None:
    add(store, tenant="stranger")
    job_id, (ref,) = planned(store, 1)
    claimed = claim(store, ref)
    said: list[str] = []
    sa.event.listen(
        store.database.engine,
        "before_cursor_execute",
        lambda c, cursor, statement, *_: said.append(statement),
    )
    result = NewResult(claimed.requests[0].id, 200, {"text": "a"})
    assert store.leases.finish(ref.id, 0, "worker", [result])
    assert store.jobs.get(job_id).state == "completed"
    about = [statement for statement in said if "webhook" in statement]
    assert len(about) == 1
    assert about[0].startswith("UPDATE job"), "the statement that ends the job asks by the way"


def test_the_event_is_in_the_transaction_that_ends_the_job(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of them is there without the other."""
    webhook = add(store)
    job_id, (ref,) = planned(store, 1)
    claimed = claim(store, ref)
    name = "nightjar.jobs.store.announcing.event_body"
    monkeypatch.setattr(name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    result = NewResult(claimed.requests[0].id, 200, {"text": "a"})
    with pytest.raises(KeyboardInterrupt):
        store.leases.finish(ref.id, 0, "worker", [result])
    assert store.jobs.get(job_id).state == "running"
    assert of(store, webhook) == []
    monkeypatch.undo()
    assert store.leases.finish(ref.id, 0, "worker", [result])
    assert len(of(store, webhook)) == 1


def test_a_tenant_sees_only_its_own(store: Store) -> None:
    mine, other = add(store), add(store, tenant="stranger")
    assert [one.id for one in store.webhooks.newest("default", 10)] == [mine.id]
    for act in (
        lambda: store.webhooks.get("default", other.id),
        lambda: store.webhooks.set_enabled("default", other.id, enabled=False),
        lambda: store.webhooks.delete("default", other.id),
    ):
        with pytest.raises(UnknownWebhookError):
            act()
    assert store.webhooks.get("stranger", other.id).enabled


def test_webhooks_are_bounded_and_paged(store: Store) -> None:
    # Sorted: ids of one millisecond have no order of their own.
    made = sorted(add(store).id for _ in range(MOST_OF_TENANT))
    with pytest.raises(TooManyWebhooksError, match="at most 16"):
        add(store)
    page = store.webhooks.newest("default", 5, after=made[10])
    assert [one.id for one in page] == made[9:4:-1]


def test_deleting_takes_the_deliveries_along_and_no_other_webhook(store: Store) -> None:
    webhook, mine, strangers = add(store), add(store), add(store, tenant="stranger")
    store.webhooks.delete("default", mine.id)
    assert [one.id for one in store.webhooks.newest("default", 10)] == [webhook.id]
    assert [one.id for one in store.webhooks.newest("stranger", 10)] == [strangers.id]
    for _ in range(3):
        finished(store)
    (claimed,) = take(store)
    store.webhooks.delete("default", webhook.id)
    with store.database.reading() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(webhook_delivery)) == 0
    assert not store.deliveries.record(claimed, Attempt(200))
    finished(store)
    with pytest.raises(UnknownWebhookError):
        store.webhooks.get("default", webhook.id)
