"""A big upload on SQLite lands in segments, and means the same as one in a single transaction."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import sqlalchemy as sa

from nightjar.jobs.errors import StoreUnavailableError
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import NewJob, NewRequest, RejectedRow
from nightjar.jobs.states import JobState, RequestKind
from nightjar.jobs.store import Store, segmented, submission
from nightjar.jobs.store.tables import leader, request, result
from nightjar.jobs.store.turns import Turns
from nightjar.pipeline.queue.sweeper import Sweeper

ROWS = 100
SEGMENT = 7


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "MOST_AT_ONCE", 10)
    monkeypatch.setattr(segmented, "SEGMENT_ROWS", SEGMENT)


@pytest.fixture
def sqlite_store(sqlite_tables: str) -> Iterator[Store]:
    opened = Store(sqlite_tables)
    yield opened
    opened.close()


def rows() -> Iterator[NewRequest | RejectedRow]:
    """Rows of three prompts in turn; some repeat a custom_id, some are rejected."""
    for n in range(ROWS):
        body = {"prompt": f"{n % 3}", "max_tokens": 4, "temperature": 0}
        given = validate_body(RequestKind.GENERATE, body)
        if n % 10 == 9:
            yield RejectedRow(n, n + 1, "row-0", "invalid_json", "is no JSON")
        else:
            name = f"row-{n - 20 if n % 10 == 4 and n > 30 else n}"
            yield NewRequest(n, n + 1, name, RequestKind.GENERATE, given)


def submit(store: Store, key: str | None = None, *, merge_equal: bool = True) -> tuple[str, bool]:
    with store.jobs.submit(NewJob("m", key, merge_equal=merge_equal)) as made:
        made.add(rows())
    assert made.existing or (made.accepted, made.rejected) == (ROWS - 12, 12)
    return made.job_id, made.existing


def read(store: Store, job_id: str) -> list[tuple[object, ...]]:
    """Every row of the job with its outcome and, by its index, its leader."""
    ahead = request.alias("ahead")
    columns = ["row_index", "line", "custom_id", "kind", "body", "state"]
    outcome = ["status_code", "error_code", "error_message", "error_param"]
    statement = (
        sa.select(
            *(request.c[name] for name in columns),
            ahead.c.row_index.label("leader"),
            *(result.c[name] for name in outcome),
        )
        .outerjoin(result, result.c.request_id == request.c.id)
        .outerjoin(ahead, ahead.c.id == request.c.leader_id)
        .where(request.c.job_id == job_id)
        .order_by(request.c.row_index)
    )
    with store.database.reading() as connection:
        return [tuple(row) for row in connection.execute(statement)]


@pytest.mark.parametrize("merge_equal", [True, False])
def test_segments_make_the_same_job(
    sqlite_store: Store, request: pytest.FixtureRequest, merge_equal: bool
) -> None:
    whole, _ = submit(sqlite_store, merge_equal=merge_equal)
    request.getfixturevalue("small_segments")
    parts, _ = submit(sqlite_store, merge_equal=merge_equal)
    first, second = (sqlite_store.jobs.get(job_id) for job_id in (whole, parts))
    assert (second.total, second.failed, second.state) == (ROWS, 12, JobState.QUEUED)
    assert (first.total, first.failed, first.state) == (ROWS, 12, JobState.QUEUED)
    assert read(sqlite_store, parts) == read(sqlite_store, whole)
    assert sqlite_store.uploads.all() == []
    with sqlite_store.database.reading() as connection:
        assert connection.execute(sa.text("PRAGMA foreign_key_check")).all() == []


@pytest.mark.usefixtures("small_segments")
def test_no_transaction_of_an_upload_is_larger_than_a_segment(sqlite_store: Store) -> None:
    sizes: list[int] = []
    visible: list[int] = []
    other = Store(sqlite_store.database.url.render_as_string())

    def look(_: sa.Connection) -> None:
        with other.database.reading() as connection:
            count = sa.select(sa.func.count()).select_from(request)
            sizes.append(connection.scalar(count) or 0)
        visible.append(len(other.jobs.newest()))

    sa.event.listen(sqlite_store.database.engine, "commit", look)
    submit(sqlite_store)
    sa.event.remove(sqlite_store.database.engine, "commit", look)
    assert max(after - before for before, after in pairwise(sizes)) == SEGMENT
    assert {size for size, jobs in zip(sizes, visible, strict=True) if jobs} == {ROWS}
    assert other.jobs.get(other.jobs.newest()[0].id).total == ROWS
    other.close()


@pytest.mark.usefixtures("small_segments")
def test_a_key_that_is_known_by_the_end_leaves_no_rows(sqlite_store: Store) -> None:
    with sqlite_store.jobs.submit(NewJob("m", "key")) as late:
        late.add(rows())
        first, existing = submit(sqlite_store, "key")
        assert not existing
    assert (late.job_id, late.existing) == (first, True)
    with sqlite_store.database.reading() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(request)) == ROWS
    assert sqlite_store.uploads.all() == []


def leave_half(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what a submitter leaves that is killed after its third segment."""
    given: list[Turns] = []

    def dies(turns: Turns) -> None:
        given.append(turns)
        if len(given) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Turns, "give", dies)
        patch.setattr(segmented, "drop_landing", lambda *_: 0)
        with pytest.raises(KeyboardInterrupt):
            submit(store)


@pytest.mark.usefixtures("small_segments")
def test_the_sweeper_takes_away_what_a_dead_submitter_left(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_half(sqlite_store, monkeypatch)
    assert sqlite_store.jobs.newest() == []
    assert sqlite_store.backlog.next_to_plan() is None
    now = [0.0]
    sweeper = Sweeper(
        sqlite_store,
        dead_after_s=8,
        redispatch_after_s=60,
        longest_gap_s=2,
        deaths_allowed=3,
        clock=lambda: now[0],
    )
    for _ in range(4):
        sweeper.sweep()
        assert len(sqlite_store.uploads.all()) == 1
        now[0] += 2
    sweeper.sweep()
    assert sqlite_store.uploads.all() == []
    with sqlite_store.database.reading() as connection:
        for table in (request, result, leader):
            assert connection.scalar(sa.select(sa.func.count()).select_from(table)) == 0


@pytest.mark.usefixtures("small_segments")
def test_a_submitter_that_was_taken_for_dead_lands_nothing_more(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweeper drops the upload between two segments."""
    given: list[Turns] = []

    def swept(turns: Turns) -> None:
        given.append(turns)
        if len(given) == 3:
            (upload,) = sqlite_store.uploads.all()
            assert sqlite_store.uploads.drop(upload.name) == 3 * SEGMENT

    monkeypatch.setattr(Turns, "give", swept)
    with pytest.raises(StoreUnavailableError, match="send it again"):
        submit(sqlite_store)
    assert sqlite_store.jobs.newest() == []
    assert sqlite_store.uploads.all() == []
