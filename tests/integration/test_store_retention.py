"""Retention in the store: which jobs are purged, what goes, what stays, what a reader is told."""

from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
import sqlalchemy as sa

from nightjar.jobs.accounts import Tenant, TenantLimits
from nightjar.jobs.batch_records import NewBatch
from nightjar.jobs.errors import LifecycleError, PurgedJobError, UnknownFileError, UnknownJobError
from nightjar.jobs.purge_records import PurgeScope
from nightjar.jobs.records import EncodedRequest, NewJob, NewMicroBatch, NewRequest, NewResult
from nightjar.jobs.states import JobState, MicroBatchState, RequestKind
from nightjar.jobs.store import Store, purging, retention
from nightjar.jobs.store.tables import job, landing, micro_batch, request, result
from tests.batches import completions, compute_all, finalize_all, ingest, lines_of, make, read_all
from tests.jobs import planned, submit
from tests.outcomes import answers, claim, compute

DAY_S = 86_400.0
ROWS = (request, result, micro_batch, landing)
ALL = PurgeScope(older_than_s=-DAY_S)


def held(store: Store, job_id: str) -> list[int]:
    """How many rows of the job each table has."""
    with store.database.reading() as connection:
        counts = [
            connection.scalar(
                sa.select(sa.func.count()).select_from(table).where(table.c.job_id == job_id)
            )
            for table in ROWS
        ]
    return [number or 0 for number in counts]


def over(store: Store, rows: int = 3, *, each: int = 2, **new: object) -> str:
    """A job that is computed, charged and over."""
    job_id, refs = planned(store, rows, each=each)
    if new:
        changed = sa.update(job).where(job.c.id == job_id).values(**new)
        store.database.write(lambda connection: connection.execute(changed))
    for ref in refs:
        compute(store, ref)
    store.shares.settle()
    return job_id


def age(store: Store, job_id: str, seconds: float) -> None:
    """Let the job have ended so long ago."""
    ended = datetime.now(UTC) - timedelta(seconds=seconds)
    moved = sa.update(job).where(job.c.id == job_id).values(finished_at=ended, purge_at=None)
    store.database.write(lambda connection: connection.execute(moved))


def newer(store: Store) -> str:
    """A job that holds the newest rows, which SQLite keeps for their ids."""
    return planned(store, 1)[0]


def test_a_purged_job_keeps_its_counts_and_loses_its_rows(store: Store) -> None:
    job_id = over(store)
    other = over(store)
    newer(store)
    before = store.jobs.get(job_id)
    with_rows = held(store, other)
    report = store.retention.sweep(PurgeScope(job_id=job_id))
    assert (report.jobs, report.rows, report.is_done) == (1, 3, True)
    after = store.jobs.get(job_id)
    assert after.purged_at is not None
    assert (after.completed, after.completion_tokens) == (3, before.completion_tokens)
    assert (after.state, after.finished_at) == (before.state, before.finished_at)
    assert held(store, job_id) == [0, 0, 0, 0]
    assert held(store, other) == with_rows
    assert store.purging.marked(PurgeScope()) == []
    assert [one.id for one in store.jobs.newest()][1:] == [other, job_id]


def test_readers_are_told_as_soon_as_it_is_marked(store: Store) -> None:
    job_id = over(store)
    (one,) = store.retention.expendable(ALL, 10)
    pages = store.results.iterate(job_id, page_size=1)
    raw = store.results.iterate_raw(job_id)
    next(pages)
    assert store.retention.mark(one)
    assert held(store, job_id)[0] == 3
    for read in (
        partial(store.results.page, job_id),
        partial(store.results.page, job_id, order="landed"),
        partial(store.results.read, job_id),
        partial(next, pages),
        partial(next, raw),
    ):
        with pytest.raises(PurgedJobError, match=f"{job_id}.*were purged at 2"):
            read()
    assert not store.retention.mark(one)
    with pytest.raises(LifecycleError, match=r"was purged.*submit it again"):
        store.retries.retry(job_id)


def test_a_retry_that_comes_late_is_undone_as_a_whole(store: Store) -> None:
    job_id, refs = planned(store, 1)
    claimed = claim(store, refs[0])
    failed = NewResult.failure(claimed.requests[0].id, "broken", "no", status=500)
    assert store.leases.finish(refs[0].id, refs[0].epoch, "worker", [failed])
    store.shares.settle()
    (one,) = store.retention.expendable(ALL, 10)
    take_back = store.retries.take_back
    assert store.retention.mark(one)
    with pytest.raises(LifecycleError, match="was purged"):
        store.database.write(partial(take_back, job_id=job_id, after=-1))
    assert held(store, job_id)[:2] == [1, 1]
    assert store.jobs.get(job_id).state is JobState.FAILED


def test_a_job_that_is_retried_first_is_not_purged(store: Store) -> None:
    job_id, refs = planned(store, 1)
    claimed = claim(store, refs[0])
    failed = NewResult.failure(claimed.requests[0].id, "broken", "no", status=500)
    assert store.leases.finish(refs[0].id, refs[0].epoch, "worker", [failed])
    store.shares.settle()
    (one,) = store.retention.expendable(ALL, 10)
    assert store.retries.retry(job_id) == 1
    assert not store.retention.mark(one)
    assert store.jobs.get(job_id).purged_at is None
    assert store.retention.expendable(ALL, 10) == []


def test_only_jobs_that_nobody_needs_are_purged(store: Store) -> None:
    """Not one that runs, nor one whose computing is not charged to its tenant yet."""
    running, refs = planned(store, 2)
    compute(store, refs[0])
    store.shares.settle()
    assert store.retention.expendable(ALL, 10) == []
    with pytest.raises(LifecycleError, match=f"{running} is running.*cancel it first"):
        store.retention.check(running)
    claimed = claim(store, refs[1])
    assert store.leases.finish(refs[1].id, refs[1].epoch, "worker", answers(claimed))
    assert store.jobs.get(running).is_over
    assert store.retention.expendable(ALL, 10) == []
    store.shares.settle()
    (one,) = store.retention.expendable(ALL, 10)
    assert (one.id, one.rows) == (running, 2)
    leased = sa.update(micro_batch).values(state=MicroBatchState.LEASED)
    store.database.write(lambda connection: connection.execute(leased))
    assert not store.retention.mark(one)
    with pytest.raises(UnknownJobError):
        store.retention.check("job_unknown")


def test_equal_requests_go_with_their_leader(store: Store) -> None:
    job_id = submit(
        store, [{"prompt": "a", "max_tokens": 4, "temperature": 0}] * 5, merge_equal=True
    )
    (queued,) = store.backlog.queued_requests(job_id, 10)
    (ref,) = store.planning.save_plan(
        job_id,
        [EncodedRequest(queued.id, [[1]])],
        [NewMicroBatch(RequestKind.GENERATE, 32, [queued.id], 5)],
    )
    compute(store, ref)
    store.shares.settle()
    newer(store)
    assert store.retention.sweep(ALL).rows == 5
    assert held(store, job_id) == [0, 0, 0, 0]


def test_the_deployment_s_time_counts_from_the_end_of_a_job(store: Store) -> None:
    old, young, newest = over(store), over(store), newer(store)
    age(store, old, 8 * DAY_S)
    age(store, young, 6 * DAY_S)
    assert store.retention.sweep(PurgeScope()).jobs == 0
    assert store.retention.sweep(PurgeScope(keep_s=7 * DAY_S)).jobs == 1
    purged = [one for one in (old, young, newest) if store.jobs.get(one).purged_at is not None]
    assert purged == [old]


def test_a_tenant_s_own_time_takes_the_place_of_the_deployment_s(store: Store) -> None:
    jobs = {}
    for name, days in (("brief", 1), ("patient", 90), ("plain", None)):
        limits = TenantLimits(keep_results_s=None if days is None else int(days * DAY_S))
        store.accounts.create_tenant(Tenant(name, limits=limits))
        jobs[name] = over(store, tenant=name)
        age(store, jobs[name], 10 * DAY_S)
    only = PurgeScope(keep_s=30 * DAY_S, tenant="plain")
    assert store.retention.expendable(only, 10) == []
    assert [one.id for one in store.retention.expendable(PurgeScope(), 10)] == [jobs["brief"]]
    found = store.retention.expendable(PurgeScope(keep_s=7 * DAY_S), 10)
    assert {one.tenant for one in found} == {"brief", "plain"}
    store.accounts.change_tenant("brief", keep_results_s=None)
    assert store.retention.expendable(PurgeScope(), 10) == []


def test_a_job_may_ask_for_less_and_never_for_more(store: Store) -> None:
    brief = over(store, keep_results_s=3_600)
    greedy = over(store, keep_results_s=int(50 * DAY_S))
    for one in (brief, greedy):
        age(store, one, 2 * DAY_S)
    assert [one.id for one in store.retention.expendable(PurgeScope(), 10)] == [brief]
    found = store.retention.expendable(PurgeScope(keep_s=DAY_S), 10)
    assert [one.id for one in found] == [brief, greedy]
    with store.database.reading() as connection:
        until = connection.scalar(sa.select(job.c.purge_at).where(job.c.id == brief))
    finished_at = store.jobs.get(brief).finished_at
    assert finished_at is not None
    assert until == finished_at + timedelta(seconds=3_600)


def test_a_retry_begins_the_time_anew(store: Store) -> None:
    job_id, refs = planned(store, 1)
    own = sa.update(job).values(keep_results_s=3_600)
    store.database.write(lambda connection: connection.execute(own))
    claimed = claim(store, refs[0])
    failed = NewResult.failure(claimed.requests[0].id, "broken", "no", status=500)
    assert store.leases.finish(refs[0].id, refs[0].epoch, "worker", [failed])
    assert store.retention.expendable(PurgeScope(), 10) == []
    assert store.retries.retry(job_id) == 1
    with store.database.reading() as connection:
        assert connection.scalar(sa.select(job.c.purge_at).where(job.c.id == job_id)) is None


def test_a_new_job_carries_its_time(store: Store) -> None:
    row = NewRequest(0, 1, "a", RequestKind.GENERATE, {"prompt": "a"})
    with store.jobs.submit(NewJob("tiny", keep_results_s=7_200)) as submission:
        submission.add([row])
    assert store.jobs.get(submission.job_id).keep_results_s == 7_200


def test_a_purge_goes_in_steps_that_are_bounded_in_rows_and_bytes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purging, "BYTES_PER_STEP", 60)
    job_id = over(store, 8, each=8)
    newer(store)
    large = sa.update(result).where(result.c.row_index == 2).values(body_bytes=1_000)
    store.database.write(lambda connection: connection.execute(large))
    left = []
    write = store.database.write

    def watched(*arguments: object, **options: object) -> object:
        answer = write(*arguments, **options)  # type: ignore[arg-type]
        left.append(held(store, job_id)[0])
        return answer

    monkeypatch.setattr(store.database, "write", watched)
    report = store.retention.sweep(PurgeScope(job_id=job_id))
    assert (report.rows, held(store, job_id)) == (8, [0, 0, 0, 0])
    steps = [before - after for before, after in zip([8, *left], left, strict=False)]
    assert max(steps) <= 2
    assert left[0] == 8  # marked before anything goes


def test_a_step_has_a_bound_in_rows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purging, "_fitting", len)
    monkeypatch.setattr(purging, "ROWS_PER_STEP", 3)
    limited = Store(store.database.url.render_as_string(hide_password=False))
    job_id = over(limited, 8, each=1)
    newer(limited)
    report = limited.retention.sweep(PurgeScope(job_id=job_id), patience_s=0.0)
    assert (report.jobs, report.rows, report.is_done) == (1, 3, False)
    assert limited.retention.sweep(PurgeScope(), patience_s=0.0).rows == 3
    report = limited.retention.sweep(PurgeScope())
    assert (report.jobs, report.rows, report.is_done) == (0, 2, True)
    assert held(limited, job_id) == [0, 0, 0, 0]
    limited.close()


def test_the_newest_rows_stay_without_content_until_there_are_newer_ones(store: Store) -> None:
    job_id = over(store)
    store.retention.sweep(ALL)
    expected = [1, 0, 1, 0] if store.database.is_sqlite else [0, 0, 0, 0]
    assert held(store, job_id) == expected
    with store.database.reading() as connection:
        rows = connection.execute(sa.select(request)).all()
        newest = connection.scalar(sa.select(sa.func.max(micro_batch.c.id))) or 0
    for row in rows:
        assert (row.body, row.segments, row.custom_id, row.micro_batch_id) == (None,) * 4
    assert store.retention.sweep(ALL).rows == 0
    _, (ref,) = planned(store, 1)
    assert ref.id > newest
    store.retention.sweep(ALL)
    assert held(store, job_id) == [0, 0, 0, 0]
    assert store.purging.marked(PurgeScope()) == []


def test_a_purge_goes_on_after_a_process_has_died(store: Store) -> None:
    first, second = over(store), over(store)
    newer(store)
    ones = store.retention.expendable(ALL, 10)
    assert {one.id for one in ones} == {first, second}
    for one in ones:
        store.retention.mark(one)
    assert store.retention.check(first)
    assert store.retention.sweep(PurgeScope(job_id=first)).rows == 3
    assert store.purging.marked(PurgeScope()) == [second]
    assert store.purging.marked(PurgeScope(tenant="other")) == []
    assert store.retention.sweep(PurgeScope()).rows == 3
    with pytest.raises(PurgedJobError):
        store.retention.check(first)


def test_a_batch_is_purged_with_its_files_once_they_were_made(store: Store) -> None:
    made = make(store, lines_of(completions(2)))
    shared = store.batches.create(NewBatch("/v1/completions", made.input_file_id))
    read_all(ingest(store))
    for one in (made, shared):
        compute_all(store, one)
    store.shares.settle()
    assert store.retention.expendable(ALL, 10) == []  # the result files are not counted
    finalize_all(store)
    found = store.retention.expendable(ALL, 10)
    assert {one.id for one in found} == {made.job_id, shared.job_id}
    output = store.batches.get(made.id, made.tenant).output_file_id
    assert output is not None
    by_id = {one.id: one for one in found}
    assert store.retention.mark(by_id[made.job_id])
    with pytest.raises(UnknownFileError):
        store.files.get(output, made.tenant)
    assert store.files.get(made.input_file_id, made.tenant)  # the other batch is kept
    assert store.retention.mark(by_id[shared.job_id])
    with pytest.raises(UnknownFileError):
        store.files.get(made.input_file_id, made.tenant)


def test_the_expiry_of_a_batch_s_output_is_the_retention_of_its_job(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(store, lines_of(completions(2)), output_expires_after_s=3_600)
    read_all(ingest(store))
    compute_all(store, made)
    store.shares.settle()
    finalize_all(store)
    ended = store.batches.get(made.id, made.tenant)
    assert ended.output_file_id is not None
    expires_at = store.files.get(ended.output_file_id, made.tenant).expires_at
    assert expires_at is not None
    clock = retention.now
    monkeypatch.setattr(retention, "now", lambda: expires_at - timedelta(seconds=1))
    assert store.retention.expendable(PurgeScope(), 10) == []
    monkeypatch.setattr(retention, "now", lambda: expires_at + timedelta(seconds=1))
    (one,) = store.retention.expendable(PurgeScope(), 10)
    assert (one.id, one.takes_input) == (made.job_id, False)
    monkeypatch.setattr(retention, "now", clock)
    assert store.retention.mark(one)
    assert store.files.get(made.input_file_id, made.tenant)  # it has an expiry of its own
