"""The files of batches become jobs: row by row, by turns, once, or with the reason why not."""

import gzip
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import count

import pytest

from nightjar.jobs.errors import (
    FileInUseError,
    LifecycleError,
    StoreError,
    StoreUnavailableError,
)
from nightjar.jobs.lines.parsing import MAX_LINE_BYTES
from nightjar.jobs.records import JobLimits, JsonObject
from nightjar.jobs.states import BatchStage, BatchStatus, JobState
from nightjar.jobs.store import Store, submission
from nightjar.jobs.store.batch_tables import batch as batch_table
from nightjar.pipeline.planning import ingest as ingest_module
from nightjar.pipeline.planning.ingest import LOOK_EVERY_S
from tests.batches import completions, ingest, lines_of, make, now, read_all, statuses
from tests.processes import completion_line, rerank_line

MIXED = lines_of(
    [
        completion_line("a", prompt="hello"),
        "broken",
        rerank_line("b", query="hello", documents=["x", "y"]),
        completion_line("a", prompt="again"),
        completion_line("c"),
    ]
)


def errors(store: Store, batch: object) -> list[JsonObject]:
    found = now(store, batch)  # type: ignore[arg-type]
    assert (found.status, found.job) == (BatchStatus.FAILED, None)
    assert found.ended_at is not None
    return list(found.errors)


def test_good_rows_become_a_job_and_each_bad_row_fails_alone(store: Store) -> None:
    batch = make(store, MIXED, metadata={"night": "밤"}, priority=3, completion_window_s=60.0)
    assert (batch.status, batch.job, batch.in_progress_at) == (BatchStatus.VALIDATING, None, None)
    read_all(ingest(store))
    found = now(store, batch)
    assert found.status is BatchStatus.IN_PROGRESS
    assert found.in_progress_at is not None
    assert found.job is not None
    assert found.job.id == batch.job_id == batch.id.replace("batch_", "job_")
    assert (found.job.total, found.job.failed, found.job.model) == (5, 3, "tiny")
    assert (found.job.metadata, found.job.priority) == ({"night": "밤"}, 3)
    # The deadline counts from the batch, not from the end of its reading.
    assert found.job.created_at == batch.created_at
    assert found.job.expires_at == batch.created_at + timedelta(seconds=60)
    failures = {
        record.line: record.error and record.error.code
        for record in store.results.iterate(batch.job_id, outcome="failed")
    }
    assert failures == {2: "invalid_json", 4: "duplicate_custom_id", 5: "missing_field"}


def test_a_batch_names_its_model(store: Store) -> None:
    batch = make(store, lines_of(completions(1)), model="other")
    read_all(ingest(store))
    assert store.jobs.get(batch.job_id).model == "other"


def test_strict_refuses_the_whole_file_for_one_bad_line(store: Store) -> None:
    batch = make(store, MIXED, strict=True)
    read_all(ingest(store))
    found = errors(store, batch)
    assert [(error["code"], error["line"], error["param"]) for error in found] == [
        ("invalid_json", 2, None),
        ("url_mismatch", 3, "url"),
        ("missing_field", 5, "body.prompt"),
    ]
    assert "/v1/rerank, not the batch's endpoint" in found[1]["message"]


def test_strict_finds_repeated_ids_and_takes_a_good_file(store: Store) -> None:
    twice = make(store, lines_of([*completions(3), *completions(1)]), strict=True)
    good = make(store, lines_of(completions(3)), strict=True)
    read_all(ingest(store))
    (error,) = errors(store, twice)
    assert (error["code"], error["line"], error["param"]) == ("duplicate_custom_id", 4, "custom_id")
    assert now(store, good).status is BatchStatus.IN_PROGRESS


OTHER_FILES = [
    (b"", "empty_file", "no lines"),
    (b"\n \n", "empty_file", "no lines"),
    (gzip.compress(MIXED), "invalid_file", "gunzip"),
    (b"PAR1....", "invalid_file", "Parquet"),
    (b"\xff\xfe" + MIXED.decode().encode("utf-16-le"), "invalid_file", "UTF-16"),
    (b"one word\nand more\n" * 300, None, "broken JSON"),
]


@pytest.mark.parametrize("strict", [False, True])
def test_a_file_of_something_else_fails_the_batch(store: Store, strict: bool) -> None:
    made = [(make(store, data, strict=strict), *told) for data, *told in OTHER_FILES]
    read_all(ingest(store))
    for batch, code, words in made:
        found = errors(store, batch)
        assert found[0]["code"] == (code or ("invalid_json" if strict else "invalid_file"))
        assert any(words in error["message"] for error in found)
        assert len(found) <= 101


def test_a_file_of_one_endless_line_fails_the_batch(store: Store) -> None:
    batch = make(store, b"[" * (MAX_LINE_BYTES + 1))
    read_all(ingest(store))
    (error, first) = errors(store, batch)
    assert (error["code"], first["code"]) == ("invalid_file", "line_too_long")


def test_too_many_bad_lines_and_too_many_rows_fail_the_batch(store: Store) -> None:
    bad = make(store, lines_of([*completions(1), *["broken"] * 300]))
    read_all(ingest(store, limits=JobLimits(rejected=200)))
    found = errors(store, bad)
    assert (found[0]["code"], found[0]["line"], len(found)) == ("too_many_rejected", None, 101)
    assert (found[1]["code"], found[1]["line"]) == ("invalid_json", 2)
    many = make(store, lines_of(completions(3)))
    read_all(ingest(store, limits=JobLimits(rows=2)))
    assert errors(store, many)[0]["code"] == "too_many_rows"


def test_files_are_read_by_turns(store: Store) -> None:
    large = make(store, lines_of(completions(400)), part_bytes=2_000)
    small = make(store, lines_of(completions(2)))
    reader = ingest(store, clock=count(step=LOOK_EVERY_S).__next__)
    steps = 0
    while next(statuses(store, [small])) != "in_progress":
        reader.step()
        steps += 1
        assert steps < 1_000
    assert next(statuses(store, [large])) == "validating"
    read_all(reader)
    assert store.jobs.get(large.job_id).total == 400


def test_one_tenants_files_do_not_keep_another_waiting(store: Store) -> None:
    flood = [make(store, lines_of(completions(50)), part_bytes=500) for _ in range(8)]
    other = make(store, lines_of(completions(1)), tenant="other")
    reader = ingest(store, clock=count(step=LOOK_EVERY_S).__next__)
    while next(statuses(store, [other])) == "validating":
        reader.step()
    assert list(statuses(store, flood)).count("validating") >= 4
    read_all(reader)
    assert set(statuses(store, [*flood, other])) == {"in_progress"}
    assert now(store, other).job is not None
    assert store.jobs.get(other.job_id).tenant == "other"


def test_a_cancel_before_the_rows_landed(store: Store) -> None:
    waiting, begun = (make(store, lines_of(completions(90)), part_bytes=900) for _ in range(2))
    reader = ingest(store)
    reader.step()
    reader.step()
    for batch in (waiting, begun):
        cancelling = store.batches.cancel(batch.id, batch.tenant)
        assert cancelling.status is BatchStatus.CANCELLING
        assert cancelling.cancelling_at is not None
    assert store.batches.cancel(begun.id, begun.tenant).cancelling_at == cancelling.cancelling_at
    read_all(reader)
    assert list(statuses(store, [waiting, begun])) == ["cancelled"] * 2
    assert store.jobs.newest() == []
    ended = store.batches.cancel(begun.id, begun.tenant)  # again: no error, and nothing changes
    assert ended.stage is BatchStage.CANCELLED


def test_a_cancel_in_the_moment_of_landing_wins_or_finds_the_job(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make(store, lines_of(completions(3)))
    reader = ingest(store)
    monkeypatch.setattr(reader, "_drop_stopped", lambda: None)  # it has looked before
    reader.step()
    store.batches.cancel(batch.id, batch.tenant)
    reader.step()
    read_all(reader)
    monkeypatch.undo()
    read_all(reader)
    assert next(statuses(store, [batch])) == "cancelled"
    assert store.jobs.newest() == []


@pytest.mark.parametrize("most_at_once", [20_000, 10])
def test_a_planner_that_ends_half_way_leaves_nothing_and_the_next_begins_anew(
    store: Store, monkeypatch: pytest.MonkeyPatch, most_at_once: int
) -> None:
    monkeypatch.setattr(submission, "MOST_AT_ONCE", most_at_once)
    batch = make(store, lines_of(completions(60)), part_bytes=1_000)
    first, second = ingest(store), ingest(store)
    for _ in range(3):
        first.step()
    first.drop()
    assert store.jobs.newest() == []
    third = ingest(store)
    for _ in range(3):  # one that was frozen wakes while another reads
        third.step()
    read_all(second)
    read_all(third)
    (job,) = store.jobs.newest()
    assert (job.id, job.total, job.state) == (batch.job_id, 60, JobState.QUEUED)
    assert store.uploads.all() == []


def test_a_file_that_ends_its_reader_again_and_again_fails_its_batch(store: Store) -> None:
    batch = make(store, lines_of(completions(60)), part_bytes=1_000)
    for _ in range(3):  # killed: nobody gives the count back
        ingest(store, attempts=3).step()
    assert next(statuses(store, [batch])) == "validating"
    read_all(ingest(store, attempts=3))
    (error,) = errors(store, batch)
    assert error["code"] == "internal_error"
    assert error["message"].endswith("the last time: the planner ended while it read the file")


def test_a_fault_that_does_not_pass_fails_the_batch_with_its_reason(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ingest_module, "_BACK_OFF_S", 0.01)
    batch = make(store, lines_of(completions(3)))
    other = make(store, lines_of(completions(3)))

    def parts(file_id: str) -> Iterator[bytes]:
        if file_id == batch.input_file_id:
            raise StoreError("the database refused the data")
        return read(file_id)

    read = store.files.parts
    monkeypatch.setattr(store.files, "parts", parts)
    read_all(ingest(store, attempts=3))
    assert "StoreError: the database refused the data" in errors(store, batch)[0]["message"]
    assert caplog.text.count("it is tried again in 0 s") == 3
    assert next(statuses(store, [other])) == "in_progress"


def test_a_fault_in_the_middle_of_a_file_is_a_failed_attempt(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make(store, lines_of(completions(3)))

    def parts(_: str) -> Iterator[bytes]:
        yield b"\n"
        raise StoreError("the database refused the data")

    monkeypatch.setattr(store.files, "parts", parts)
    reader = ingest(store)
    while store.batch_work.still_to_read([batch.job_id]) and reader.step().pause_s == 0:
        pass  # until it is put off
    assert store.batch_work.count_reading(batch.job_id, 0) == 1


def test_a_database_that_is_away_is_no_failed_attempt(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make(store, lines_of(completions(60)), part_bytes=1_000)
    reader = ingest(store, attempts=1)
    reader.step()
    with monkeypatch.context() as away:
        away.setattr(submission, "stage", _unavailable)
        reader.step()
        with pytest.raises(StoreUnavailableError):
            reader.step()  # it is raised with the next part
    read_all(reader)
    assert next(statuses(store, [batch])) == "in_progress"


def _unavailable(*_: object, **__: object) -> None:
    raise StoreUnavailableError("away")


def test_a_planner_that_ends_in_order_is_no_failed_attempt(store: Store) -> None:
    batch = make(store, lines_of(completions(60)), part_bytes=1_000)
    for _ in range(9):
        reader = ingest(store, attempts=1)
        reader.step()
        reader.drop()
    read_all(ingest(store, attempts=1))
    assert next(statuses(store, [batch])) == "in_progress"


def test_a_file_is_held_while_it_is_read_and_may_be_deleted_afterwards(store: Store) -> None:
    batch = make(store, lines_of(completions(2)))
    with pytest.raises(FileInUseError):
        store.files.delete(batch.input_file_id, batch.tenant)
    read_all(ingest(store))
    store.files.delete(batch.input_file_id, batch.tenant)
    assert now(store, batch).status is BatchStatus.IN_PROGRESS
    assert store.backlog.queued_requests(batch.job_id, 9)


def test_a_file_that_is_gone_before_it_is_read_fails_the_batch(store: Store) -> None:
    batch = make(store, lines_of(completions(2)))
    store.database.write(
        lambda connection: connection.execute(
            batch_table.update().values(input_file_id="file-gone")
        )
    )
    read_all(ingest(store))
    assert errors(store, batch)[0]["code"] == "file_not_found"


def test_a_job_that_stands_for_a_batch_can_be_cancelled_as_a_job(store: Store) -> None:
    batch = make(store, lines_of(completions(2)))
    read_all(ingest(store))
    store.stopping.request_cancel(batch.job_id)
    found = now(store, batch)
    assert (found.status, found.cancelling_at is None) == (BatchStatus.CANCELLING, False)


def test_what_is_over_cannot_be_cancelled(store: Store) -> None:
    failed = make(store, b"")
    read_all(ingest(store))
    with pytest.raises(LifecycleError, match="is failed: nothing of it can be cancelled"):
        store.batches.cancel(failed.id, failed.tenant)


@pytest.mark.parametrize(
    ("named", "model", "code"),
    [
        (["other", "second", None], "second", None),
        ([None, None], None, "missing_model"),
        (["other"], None, "model_not_found"),
    ],
)
def test_the_lines_of_a_batch_name_its_model_where_there_are_several(
    store: Store, named: list[str | None], model: str | None, code: str | None
) -> None:
    lines = [
        completion_line(f"row-{n}", prompt="hello", max_tokens=4, **({"model": one} if one else {}))
        for n, one in enumerate(named)
    ]
    batch = make(store, lines_of(lines))
    read_all(ingest(store, models="first second"))
    found = store.batches.get(batch.id, "default")
    assert [error["code"] for error in found.errors] == ([code] if code else [])
    assert (None if found.job is None else found.job.model) == model


def test_a_batch_beyond_its_tenants_quota_fails_with_the_reason(store: Store) -> None:
    store.accounts.change_tenant("default", rows_waiting=2)
    batch = make(store, MIXED)
    read_all(ingest(store))
    (error,) = errors(store, batch)
    assert error["code"] == "rows_waiting_exceeded"
    assert "never fits" in error["message"]


def test_others_are_looked_for_now_and_then_while_a_file_is_read(store: Store) -> None:
    """A look asks the database four times, and reading a part takes little longer."""
    moment = 0.0
    reader = ingest(store, clock=lambda: moment)
    large = make(store, lines_of(completions(40)), part_bytes=100)
    reader.step()
    small = make(store, lines_of(completions(1)))
    reader.step()
    assert store.batch_work.count_reading(large.job_id, 0) == 1
    assert store.batch_work.count_reading(small.job_id, 0) == 0
    moment += LOOK_EVERY_S
    reader.step()
    assert store.batch_work.count_reading(small.job_id, 0) == 1
    store.batches.cancel(large.id, "default")
    moment += LOOK_EVERY_S
    while (pause_s := reader.step().pause_s) is not None:
        time.sleep(pause_s)
        moment += LOOK_EVERY_S
    assert now(store, large).status is BatchStatus.CANCELLED
    assert now(store, small).status is BatchStatus.IN_PROGRESS
