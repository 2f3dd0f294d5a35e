"""What people look at comes from bounded reads: what it says, and how the databases find it."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import chain

import pytest
import sqlalchemy as sa

from nightjar.jobs.overview_records import JobFilter, ServedView, StoredSession
from nightjar.jobs.records import NewResult
from nightjar.jobs.states import JobState, MicroBatchState
from nightjar.jobs.store import Store, failures, job_figures, job_listing
from nightjar.jobs.store.tables import result
from nightjar.jobs.workers import ComputeSeconds
from tests.bulk_jobs import later_micro_batches, old_jobs, running_job
from tests.jobs import planned, submit, submit_for
from tests.outcomes import answers, claim, compute
from tests.query_plans import explained, whole_reads


def ids(store: Store, wanted: JobFilter, limit: int = 50) -> list[list[str]]:
    """The ids of every page."""
    pages: list[list[str]] = []
    after: str | None = None
    while True:
        page = store.listing.page(wanted, after=after, limit=limit)
        pages.append([one.id for one in page.jobs])
        after = page.next_after
        if after is None:
            return pages


def test_jobs_are_listed_by_state_in_pages_newest_first(store: Store) -> None:
    made = [submit_for(store, "default", 1) for _ in range(7)]
    submit_for(store, "other", 1)
    for one in made[::2]:
        store.stopping.cancel(one)
    all_pages = ids(store, JobFilter("default"), limit=3)
    assert all_pages == [made[6:3:-1], made[3:0:-1], made[:1]]
    stopped = (JobState.CANCELLED, JobState.EXPIRED)
    assert ids(store, JobFilter("default", stopped), limit=3) == [made[6::-2][:3], made[:1]]
    assert ids(store, JobFilter("default", (JobState.QUEUED,))) == [made[5::-2]]
    assert ids(store, JobFilter("nobody")) == [[]]


def test_a_text_is_searched_in_a_bounded_number_of_jobs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_listing, "SEARCHED_JOBS", 4)
    made = [
        submit(store, [{"prompt": "a"}], model="50%_Owl" if n == 1 else "bat") for n in range(6)
    ]
    page = store.listing.page(JobFilter("default", text="%_oWL"), after=None, limit=50)
    assert (page.jobs, page.searched, page.next_after) == ([], 4, made[2])
    page = store.listing.page(JobFilter("default", text="%_oWL"), after=made[2], limit=50)
    assert ([one.id for one in page.jobs], page.searched) == ([made[1]], 2)
    assert page.next_after is None
    found = ids(store, JobFilter("default", model="bat"), limit=2)
    assert list(chain.from_iterable(found)) == [one for one in reversed(made) if one != made[1]]
    assert ids(store, JobFilter("default", text=made[5][-6:]))[0] == [made[5]]


def test_stages_count_rows_by_kind_and_bucket(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, refs = planned(store, 10, each=2)
    compute(store, refs[0])
    claim(store, refs[1])
    store.planning.mark_dispatched([refs[2]])
    found = store.figures.stages(job_id)
    assert {one.state: (one.micro_batches, one.rows) for one in found.counts} == {
        MicroBatchState.DONE: (1, 2),
        MicroBatchState.LEASED: (1, 2),
        MicroBatchState.DISPATCHED: (1, 2),
        MicroBatchState.READY: (2, 4),
    }
    assert not found.truncated
    monkeypatch.setattr(job_figures, "COUNTED_MICRO_BATCHES", 2)
    assert job_figures.JobFigures(store.database).stages(job_id).truncated


def test_the_curve_says_when_each_position_was_reached(store: Store) -> None:
    job_id, refs = planned(store, 40, each=4)
    begun = datetime(2026, 11, 24, 1, 0, tzinfo=UTC)
    for place, ref in enumerate(refs):
        compute(store, ref)
        moment = begun + timedelta(minutes=place)
        store.database.write(
            lambda connection, place=place, moment=moment: connection.execute(
                sa.update(result)
                .where(result.c.row_index.between(4 * place, 4 * place + 3))
                .values(created_at=moment)
            )
        )
    curve = store.figures.landed(job_id, points=14)
    assert [point.position for point in curve] == list(range(0, 40, 3))
    assert [point.at for point in curve] == [
        begun + timedelta(minutes=place // 4) for place in range(0, 40, 3)
    ]
    assert store.figures.landed(planned(store, 2)[0]) == []


def test_a_rate_is_that_of_the_latest_rows(store: Store) -> None:
    job_id, refs = planned(store, 4, each=2)
    compute(store, refs[0])
    job = store.jobs.get(job_id)
    (rate,) = store.figures.rates([job]).values()
    assert job.started_at is not None
    elapsed_s = (datetime.now(UTC) - job.started_at).total_seconds()
    assert 2 / elapsed_s <= rate
    compute(store, refs[1])
    assert store.figures.rates([store.jobs.get(job_id)]) == {}


def test_lengths_are_those_of_successes_and_of_a_sample(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, refs = planned(store, 12, each=6)
    claimed = claim(store, refs[0])
    landed = answers(claimed)
    landed[2] = NewResult.failure(landed[2].request_id, "context_exceeded", "too long")
    store.leases.finish(claimed.id, claimed.epoch, "worker", landed)
    found = store.figures.lengths(job_id, 12)
    assert (len(found.rows), found.searched, found.whole) == (5, 12, True)
    assert {(one.prompt, one.requested, one.generated) for one in found.rows} == {(3, 4, 2)}
    monkeypatch.setattr(job_figures, "SAMPLED_ROWS", 6)
    found = store.figures.lengths(job_id, 12)
    assert (found.searched, found.whole) == (6, False)
    assert found == store.figures.lengths(job_id, 12)
    places = job_figures.sampled_places(job_id, 12)
    assert [place // 2 for place in places] == list(range(6))


def test_failures_are_grouped_and_paged(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, refs = planned(store, 9, each=9)
    claimed = claim(store, refs[0])
    landed = answers(claimed)
    for place in (0, 1, 3, 4, 5, 8):
        code = "bad_luck" if place == 4 else "context_exceeded"
        landed[place] = NewResult.failure(
            landed[place].request_id, code, f"row {place}", param="body.prompt"
        )
    store.leases.finish(claimed.id, claimed.epoch, "worker", landed)
    found = store.failures.reasons(job_id)
    assert [(one.code, one.rows, one.message, one.first_row) for one in found.reasons] == [
        ("context_exceeded", 5, "row 0", 0),
        ("bad_luck", 1, "row 4", 4),
    ]
    assert not found.truncated
    rows, after = store.failures.rows(job_id, "context_exceeded", limit=3)
    assert ([one.index for one in rows], after) == ([0, 1, 3], 3)
    assert (rows[0].custom_id, rows[0].line, rows[0].param) == ("row-0", 1, "body.prompt")
    rows, after = store.failures.rows(job_id, "context_exceeded", after=3, limit=3)
    assert ([one.index for one in rows], after) == ([5, 8], None)
    monkeypatch.setattr(failures, "SEARCHED_FAILURES", 2)
    assert store.failures.rows(job_id, "bad_luck") == ([], 1)


def test_workers_and_queues_say_what_is_computed_and_what_waits(store: Store) -> None:
    job_id, refs = planned(store, 6, each=2)
    claim(store, refs[0])
    store.planning.mark_dispatched([refs[1]])
    store.heartbeats.beat("worker", ComputeSeconds(5.0, 1.0))
    store.heartbeats.beat("ended", ComputeSeconds())
    store.models.serve("worker", ["f" * 64])
    (worker,) = store.deployment.workers()
    assert (worker.owner, worker.engine_s) == ("worker", 5.0)
    assert worker.models == [ServedView("f" * 12)]
    said = {"models": [{"name": "owl", "slots": 64, "running": 3, "kv_held": 7, "new": 1}, {}]}
    store.heartbeats.beat("worker", ComputeSeconds(5.0, 1.0), said)
    assert store.deployment.workers()[0].models == [
        ServedView("owl", slots=64, running=3, kv_held=7)
    ]
    (held,) = worker.held
    assert (held.job_id, held.tenant, held.rows, held.live) == (job_id, "default", 2, False)
    (queue,) = store.deployment.queues()
    assert (queue.waiting, queue.dispatched, queue.computing, queue.rows) == (1, 1, 1, 6)
    assert queue.oldest_at == store.jobs.get(job_id).created_at


def test_a_session_is_found_until_it_expires_or_ends(store: Store) -> None:
    moment = datetime.now(UTC)
    live = StoredSession("k" * 64, "nj_12345678", moment + timedelta(hours=1))
    store.sessions.begin("a" * 64, live)
    store.sessions.begin("b" * 64, StoredSession("k" * 64, None, moment - timedelta(seconds=1)))
    assert store.sessions.find("a" * 64) == live
    assert store.sessions.find("b" * 64) is None
    store.sessions.begin("c" * 64, live)  # sweeps what has expired
    with store.database.reading() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM page_session")) == 2
    store.sessions.end("a" * 64)
    assert store.sessions.find("a" * 64) is None


@pytest.fixture
def large(store: Store) -> str:
    """A job of many rows beside many jobs, as both databases know by their statistics."""
    old_jobs(store, 4_000)
    job_id = running_job(store, 20_000)
    later_micro_batches(store, 30_000)
    with store.database.engine.begin() as connection:
        connection.exec_driver_sql("ANALYZE")
    return job_id


READS: dict[str, Callable[[Store, str], object]] = {
    "list": lambda store, _: store.listing.page(JobFilter("default"), after=None, limit=50),
    "list behind": lambda store, _: store.listing.page(
        JobFilter("default"), after="job_00102000", limit=50
    ),
    "list of a state": lambda store, _: store.listing.page(
        JobFilter("default", (JobState.FAILED,)), after="job_00102000", limit=50
    ),
    "list of states": lambda store, _: store.listing.page(
        JobFilter("default", (JobState.FAILED, JobState.PAUSED)), after=None, limit=50
    ),
    "search": lambda store, _: store.listing.page(
        JobFilter("default", text="nightly-7"), after=None, limit=50
    ),
    "stages": lambda store, job_id: store.figures.stages(job_id),
    "curve": lambda store, job_id: store.figures.landed(job_id),
    "lengths": lambda store, job_id: store.figures.lengths(job_id, 20_000),
    "rates": lambda store, job_id: store.figures.rates([store.jobs.get(job_id)]),
    "reasons": lambda store, job_id: store.failures.reasons(job_id),
    "failed rows": lambda store, job_id: store.failures.rows(job_id, "context_exceeded", after=90),
    "waiting": lambda store, job_id: store.jobs.waiting_for(job_id),
    "results": lambda store, job_id: store.results.read(job_id, after_index=500, limit=20),
    "asked": lambda store, job_id: store.previews.asked(
        [one.id for one in store.results.read(job_id, after_index=3, limit=3)]
    ),
    "workers": lambda store, _: store.deployment.workers(),
    "queues": lambda store, _: store.deployment.queues(),
}


def test_no_page_reads_a_whole_table(store: Store, large: str) -> None:
    for name, read in READS.items():
        with explained(store) as statements:
            assert read(store, large) is not None
        assert statements, name
        for statement, plan in statements:
            assert whole_reads(plan) == [], (name, statement, plan)


def test_a_whole_read_is_seen(store: Store, large: str) -> None:
    with explained(store) as statements, store.database.reading() as connection:
        connection.execute(sa.select(sa.func.count()).where(result.c.prompt_tokens > 3)).all()
    ((_, plan),) = statements
    assert whole_reads(plan) == ["result"]


def test_figures_of_a_large_job(store: Store, large: str) -> None:
    sample = store.figures.lengths(large, 20_000)
    assert (sample.searched, sample.whole) == (job_figures.SAMPLED_ROWS, False)
    assert 0.7 * 0.96 < len(sample.rows) / sample.searched < 0.9
    curve = store.figures.landed(large)
    assert (curve[0].position, curve[-1].position) == (0, 15_999)
    assert store.failures.reasons(large).reasons[0].rows == 640
