"""How jobs come in: whole or not at all, each bad row with its own error."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from nightjar.jobs.accounts import Tenant
from nightjar.jobs.errors import EmptyJobError, JobError, StoreError, UnusableDatabaseError
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import NewJob, NewRequest, RejectedRow, RequestError
from nightjar.jobs.states import JobState, RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.store.common import now
from nightjar.jobs.store.staging import staged
from nightjar.jobs.store.submission import new_job_id
from nightjar.jobs.workers import ComputeSeconds
from tests.bulk_jobs import finished_job
from tests.outcomes import codes

BODY = validate_body(
    RequestKind.GENERATE,
    {"prompt": "안녕 \x00 😀", "max_tokens": 4, "seed": None, "temperature": 0.5},
)


def good(index: int, custom_id: str | None = None) -> NewRequest:
    name = f"row-{index}" if custom_id is None else custom_id
    return NewRequest(index, index + 1, name, RequestKind.GENERATE, BODY)


def bad(index: int, custom_id: str | None = None) -> RejectedRow:
    return RejectedRow(index, index + 1, custom_id, "invalid_value", "no good", "body.stop")


def test_a_job_of_good_rows(store: Store) -> None:
    with store.jobs.submit(NewJob("tiny", metadata={"night": "밤"})) as submission:
        submission.add([good(0), good(1)])
        submission.add([good(2)])
    job = store.jobs.get(submission.job_id)
    assert (job.state, job.model, job.total) == (JobState.QUEUED, "tiny", 3)
    assert (job.completed, job.failed, job.cancelled, job.started_at) == (0, 0, 0, None)
    assert job.metadata == {"night": "밤"}
    assert job.created_at.utcoffset() is not None
    assert (submission.accepted, submission.rejected, submission.existing) == (3, 0, False)
    queued = store.backlog.queued_requests(job.id, 10)
    assert [(item.index, item.custom_id) for item in queued] == [
        (0, "row-0"),
        (1, "row-1"),
        (2, "row-2"),
    ]
    assert queued[0].body == BODY
    assert store.backlog.jobs_to_plan() == [job.id]


def test_a_job_that_was_asked_for_earlier_counts_from_then(store: Store) -> None:
    asked = now() - timedelta(hours=1)
    new = NewJob("tiny", completion_window_s=60.0, created_at=asked)
    with store.jobs.submit(new) as submission:
        submission.add([good(0)])
    found = store.jobs.get(submission.job_id)
    assert (found.created_at, found.expires_at) == (asked, asked + timedelta(seconds=60))


def test_bad_rows_land_as_failed_results_at_once(store: Store) -> None:
    with store.jobs.submit(NewJob("tiny")) as submission:
        submission.add([good(0), bad(1, "mine"), bad(2)])
    assert (submission.accepted, submission.rejected) == (1, 2)
    job = store.jobs.get(submission.job_id)
    assert (job.state, job.total, job.failed) == (JobState.QUEUED, 3, 2)
    results = store.results.read(job.id)
    assert [(item.index, item.line, item.custom_id) for item in results] == [
        (1, 2, "mine"),
        (2, 3, None),
    ]
    assert results[0].error == RequestError("invalid_value", "no good", "body.stop")
    assert results[0].status_code == 400


def test_a_job_of_bad_rows_alone_is_over(store: Store) -> None:
    with store.jobs.submit(NewJob("tiny")) as submission:
        submission.add([bad(0), bad(1)])
    job = store.jobs.get(submission.job_id)
    assert (job.state, job.failed, job.is_over) == (JobState.FAILED, 2, True)
    assert store.backlog.jobs_to_plan() == []


def test_a_repeated_custom_id_is_rejected_wherever_it_stands(store: Store) -> None:
    with store.jobs.submit(NewJob("tiny")) as submission:
        submission.add([good(0, "a"), good(1, "b"), good(2, "a")])
        submission.add([bad(3, "c"), good(4, "c"), good(5, "b")])
    assert (submission.accepted, submission.rejected) == (3, 3)
    results = store.results.read(submission.job_id)
    assert [item.index for item in results] == [2, 3, 5]
    assert codes(results) == ["duplicate_custom_id", "invalid_value", "duplicate_custom_id"]
    error = results[0].error
    assert error is not None
    assert error.param == "custom_id"
    assert "line 3" in error.message
    assert "line 1" in error.message
    assert [item.index for item in store.backlog.queued_requests(submission.job_id, 9)] == [0, 1, 4]


def test_a_content_key_is_of_its_tenant_and_merges_nothing(store: Store) -> None:
    """However the row comes in; nobody reads or writes the kept answers of others."""
    for name in ("owls", "bats"):
        store.accounts.create_tenant(Tenant(name))
    body = validate_body(RequestKind.GENERATE, {"prompt": "a", "temperature": 0})
    rows = [
        NewRequest(n, n + 1, f"row-{n}", RequestKind.GENERATE, body | {"content_key": f"key-{n}"})
        for n in range(2)
    ]
    keys: dict[str, list[str]] = {}
    for name in ("owls", "bats"):
        new = NewJob("tiny", tenant=name)
        with store.jobs.submit(new) as submission:
            submission.add(rows)
        opened = store.appending.open(new)[0]
        store.appending.append(opened.id, 0, rows[:1], "digest")
        call = new_job_id()
        store.live.submit(new, call, rows[0].kind, rows[0].body)
        found = [
            store.backlog.queued_requests(job_id, 10)
            for job_id in (submission.job_id, opened.id, call)
        ]
        # Of equal texts one is computed, whatever their keys; the other one follows it.
        assert [len(some) for some in found] == [1, 1, 1]
        keys[name] = [some[0].body["content_key"] for some in found]
    assert [len(set(some)) for some in keys.values()] == [1, 1]
    assert keys["owls"] != keys["bats"]
    assert "key-0" not in {*keys["owls"], *keys["bats"]}


def test_two_jobs_may_use_the_same_custom_ids(store: Store) -> None:
    for _ in range(2):
        with store.jobs.submit(NewJob("tiny")) as submission:
            submission.add([good(0, "same")])
        assert submission.accepted == 1


def test_an_exception_leaves_no_trace(store: Store) -> None:
    def broken() -> None:
        with store.jobs.submit(NewJob("tiny", idempotency_key="night")) as submission:
            submission.add(good(index) for index in range(2_500))
            raise RuntimeError("the line broke")

    with pytest.raises(RuntimeError, match="the line broke"):
        broken()
    assert store.jobs.newest() == []
    with store.jobs.submit(NewJob("tiny", idempotency_key="night")) as submission:
        submission.add([good(0)])
    assert (submission.existing, store.jobs.get(submission.job_id).total) == (False, 1)


def test_a_job_without_rows_is_refused(store: Store) -> None:
    with pytest.raises(EmptyJobError, match="at least one"), store.jobs.submit(NewJob("tiny")):
        pass
    assert store.jobs.newest() == []


def test_a_known_idempotency_key_gives_its_job_back(store: Store) -> None:
    with store.jobs.submit(NewJob("tiny", idempotency_key="night")) as first:
        first.add([good(0)])
    with store.jobs.submit(NewJob("tiny", idempotency_key="night")) as second:
        assert second.existing
        second.add([good(0), good(1)])
    assert second.job_id == first.job_id
    assert store.jobs.get(first.job_id).total == 1


def test_of_two_submissions_with_one_key_at_once_one_lands(store: Store) -> None:
    barrier = threading.Barrier(4)
    landed: list[tuple[str, bool]] = []

    def submit() -> None:
        with store.jobs.submit(NewJob("tiny", idempotency_key="night")) as submission:
            barrier.wait()
            submission.add(good(index) for index in range(50))
        landed.append((submission.job_id, submission.existing))

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({job_id for job_id, _ in landed}) == 1
    assert sorted(existing for _, existing in landed) == [False, True, True, True]
    assert len(store.jobs.newest()) == 1


def test_many_rows_arrive_in_order(store: Store) -> None:
    with store.jobs.submit(NewJob("tiny")) as submission:
        submission.add(good(index) for index in range(3_001))
    queued = store.backlog.queued_requests(submission.job_id, 5_000)
    assert [item.index for item in queued] == list(range(3_001))
    assert [item.id for item in queued] == sorted(item.id for item in queued)


def test_a_staging_submission_blocks_no_writer(store: Store) -> None:
    with store.jobs.submit(NewJob("tiny")) as submission:
        submission.add(good(index) for index in range(1_500))
        # It would wait half a minute for SQLite's lock, and fail.
        store.heartbeats.beat("worker", ComputeSeconds())
        submission.add([good(1_500)])
    assert submission.accepted == 1_501


def test_a_submission_can_follow_another_on_the_same_connection(store: Store) -> None:
    for total in (2, 3):
        with store.jobs.submit(NewJob("tiny")) as submission:
            submission.add(good(index) for index in range(total))
        assert store.jobs.get(submission.job_id).total == total


def test_a_store_without_tables_says_so(database_url: str) -> None:
    empty = Store(database_url)
    try:
        with pytest.raises(JobError):
            empty.jobs.newest()
        with pytest.raises(JobError):
            empty.ping()
    finally:
        empty.close()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://a/b", "nonsense"])
def test_unusable_databases(url: str) -> None:
    with pytest.raises(UnusableDatabaseError):
        Store(url)


def test_errors_do_not_carry_prompts(store: Store) -> None:
    twice = [good(0), good(0)]  # the same row index

    def submit() -> None:
        with store.jobs.submit(NewJob("tiny")) as submission:
            submission.add(twice)

    with pytest.raises(StoreError) as caught:
        submit()
    assert "안녕" not in str(caught.value)
    assert store.jobs.newest() == []


def test_an_upload_that_fails_tells_its_own_error(store: Store) -> None:
    """Though the table of its rows cannot be dropped: its connection leaves the pool."""

    def upload() -> None:
        with store.jobs.submit(NewJob("tiny")) as submission:
            submission.add([good(0)])
            raise KeyboardInterrupt

    def lose(*event: Any) -> None:
        if f"TABLE {staged.name}" in event[2] and "DROP" in event[2]:
            raise sa.exc.OperationalError(event[2], {}, Exception("the connection is lost"))

    sa.event.listen(store.database.engine, "before_cursor_execute", lose)
    with pytest.raises(KeyboardInterrupt):
        upload()
    sa.event.remove(store.database.engine, "before_cursor_execute", lose)
    with store.jobs.submit(NewJob("tiny")) as again:
        again.add([good(0)])
    assert [job.id for job in store.jobs.newest()] == [again.job_id]


def test_repeated_ids_are_looked_for_only_where_the_index_kept_rows_out(store: Store) -> None:
    """Landing 200,000 rows on PostgreSQL spent minutes in looking for ids that nobody repeated."""
    looked: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(f"UPDATE {staged.name}"):
            looked.append(statement)

    sa.event.listen(store.database.engine, "before_cursor_execute", note)
    with store.jobs.submit(NewJob("tiny")) as submission:
        submission.add([good(index) for index in range(20)])
    assert not looked
    with store.jobs.submit(NewJob("tiny")) as submission:
        submission.add([good(0), good(1, "row-0")])
    sa.event.remove(store.database.engine, "before_cursor_execute", note)
    assert len(looked) == 1
    job = store.jobs.get(submission.job_id)
    assert (job.total, job.failed) == (2, 1)


def test_repeated_ids_are_looked_for_by_their_index(store: Store) -> None:
    """PostgreSQL read all rows of the job for each of them, once it had statistics of others."""
    finished_job(store, 2_000, days=1)
    if store.database.is_sqlite:
        explain = "EXPLAIN QUERY PLAN "
    else:
        explain = "EXPLAIN "
        with store.database.engine.begin() as connection:
            connection.execute(sa.text("ANALYZE request"))
    plans: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith(f"UPDATE {staged.name}"):
            cursor.execute(explain + statement, parameters)
            plans.append(str(cursor.fetchall()))

    sa.event.listen(store.database.engine, "before_cursor_execute", note)
    with store.jobs.submit(NewJob("tiny")) as submission:
        submission.add([good(0), good(1), good(2, "row-1")])
    sa.event.remove(store.database.engine, "before_cursor_execute", note)
    (plan,) = plans
    by_both = "(job_id=? AND " if store.database.is_sqlite else "job_id_custom_id_idx"
    assert plan.count(by_both) == 2, plan
