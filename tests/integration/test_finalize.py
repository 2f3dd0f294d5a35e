"""Result files of batches: their exact bytes, once, and only where there are lines."""

import json

import pytest

from nightjar.jobs.batch_records import Batch, Finalization
from nightjar.jobs.errors import LifecycleError, UnknownFileError
from nightjar.jobs.file_records import FilePurpose
from nightjar.jobs.lines.batch_lines import json_pieces, output_line
from nightjar.jobs.records import EncodedRequest, NewMicroBatch, RequestError
from nightjar.jobs.states import BatchStatus, RequestKind
from nightjar.jobs.store import Store
from nightjar.pipeline.planning import finalize
from nightjar.pipeline.planning.finalize import Finalizer
from tests.batches import Line, completions, compute_all, finalize_all, landed, now
from tests.outcomes import compute
from tests.processes import completion_line


def content(store: Store, batch: Batch, file_id: str | None) -> bytes:
    """What the file's reader is sent; its stated size is checked."""
    assert file_id is not None
    file = store.files.get(file_id, batch.tenant)
    assert (file.purpose, file.job_id) == (FilePurpose.BATCH_OUTPUT, batch.job_id)
    assert file.outcome is not None
    data = b"".join(json_pieces(store.results.iterate_raw(batch.job_id, outcome=file.outcome)))
    assert len(data) == file.bytes
    return data


def test_output_and_errors_have_exactly_their_bytes(store: Store) -> None:
    batch = landed(store, [*completions(9), "broken"])
    assert not Finalizer(store).step()  # it is not over
    compute_all(store, batch, refused=2)
    assert now(store, batch).status is BatchStatus.FINALIZING
    finalize_all(store)
    found = now(store, batch)
    assert found.status is BatchStatus.COMPLETED
    assert found.ended_at is not None
    assert content(store, batch, found.output_file_id).count(b"\n") == 7
    assert content(store, batch, found.error_file_id).count(b"\n") == 3
    names = [file.filename for file in store.files.newest(9, batch.tenant)]
    assert set(names) == {f"{batch.id}_output.jsonl", f"{batch.id}_errors.jsonl", "in.jsonl"}


def test_shared_answers_are_counted_as_they_are_written(store: Store) -> None:
    equal: list[Line] = [completion_line(f'"{n}" 가\n', prompt="the same") for n in range(7)]
    batch = landed(store, [*equal, *completions(2)])
    compute_all(store, batch)
    finalize_all(store)
    lines = content(store, batch, now(store, batch).output_file_id)
    assert lines.count(b'"reused":"job"') == 6
    told = [json.loads(line) for line in lines.splitlines()]
    assert told == [output_line(record) for record in store.results.iterate(batch.job_id)]


@pytest.mark.parametrize(("bodies", "parts"), [(0, [1, 1, 1]), (2, [2, 1]), (3, [3])])
def test_shared_answers_are_read_together_up_to_the_size_of_a_page(
    store: Store, monkeypatch: pytest.MonkeyPatch, bodies: int, parts: list[int]
) -> None:
    """The first `bodies` answers fill a page to its last byte; a larger one is read alone."""
    equal: list[Line] = [completion_line(f"row-{n}", prompt="the same") for n in range(4)]
    batch = landed(store, equal)
    compute_all(store, batch)
    page = store.results.lengths(batch.job_id, -1, 9)
    assert page is not None
    shared = [shape for shape in page.others if shape.is_reused]
    read = store.results.raw
    asked: list[int] = []

    def noted(ids: list[int]) -> object:
        asked.append(len(ids))
        return read(ids)

    monkeypatch.setattr(store.results, "raw", noted)
    room = sum(shape.body_bytes for shape in shared[:bodies])
    monkeypatch.setattr(finalize, "PAGE_BYTES", max(1, room))
    finalize_all(store)
    assert asked == parts
    assert content(store, batch, now(store, batch).output_file_id).count(b"\n") == 4


def test_a_batch_of_failures_is_completed_without_an_output_file(store: Store) -> None:
    batch = landed(store, completions(3))
    compute_all(store, batch, refused=3)
    finalize_all(store)
    found = now(store, batch)
    assert (found.status, found.output_file_id) == (BatchStatus.COMPLETED, None)
    assert b'"status_code":400' in content(store, batch, found.error_file_id)


def test_a_batch_of_successes_has_no_error_file(store: Store) -> None:
    batch = landed(store, completions(3))
    compute_all(store, batch)
    finalize_all(store)
    assert now(store, batch).error_file_id is None
    assert len(store.files.newest(9, batch.tenant, purpose=FilePurpose.BATCH_OUTPUT)) == 1


def test_cancelled_and_expired_batches_keep_what_finished(store: Store) -> None:
    cancelled = landed(store, completions(4))
    expired = landed(store, completions(4), completion_window_s=1e-6)
    for batch in (cancelled, expired):
        (first, *_) = store.backlog.queued_requests(batch.job_id, 1)
        (ref,) = store.planning.save_plan(
            batch.job_id,
            [EncodedRequest(first.id, [[1]])],
            [NewMicroBatch(RequestKind.GENERATE, 32, [first.id], 7)],
            [],
        )
        assert compute(store, ref)
    assert store.stopping.expire() == [expired.job_id]
    assert now(store, expired).status is BatchStatus.IN_PROGRESS
    assert store.batches.cancel(cancelled.id, "default").status is BatchStatus.CANCELLING
    store.stopping.finish()
    assert now(store, cancelled).status is BatchStatus.CANCELLING
    assert now(store, expired).status is BatchStatus.FINALIZING
    finalize_all(store)
    for batch, status in ((cancelled, "cancelled"), (expired, "expired")):
        found = now(store, batch)
        assert found.status.value == status
        assert content(store, batch, found.output_file_id).count(b"\n") == 1
        rest = content(store, batch, found.error_file_id)
        assert rest.count(f'"code":"batch_{status}"'.encode()) == rest.count(b"\n") == 3
        assert rest.count(b'"response":null') == 3


def test_another_planner_goes_on_where_the_first_has_counted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finalize, "_PAGE_ROWS", 2)
    monkeypatch.setattr(finalize, "_TURN_S", 1.5)
    batch = landed(store, completions(9))
    compute_all(store, batch, refused=3)
    clock = iter(range(100))
    seen: list[Finalization] = []
    while now(store, batch).status is BatchStatus.FINALIZING:
        seen += store.batch_work.to_finalize(9)
        # Each counts one page: its clock goes a second with every look.
        Finalizer(store, clock=lambda: next(clock)).step()
    counted = [one.counted_to for one in seen]
    assert counted == sorted(set(counted))
    assert len(counted) > 3
    found = now(store, batch)
    assert content(store, batch, found.output_file_id).count(b"\n") == 6
    assert content(store, batch, found.error_file_id).count(b"\n") == 3


def test_two_planners_make_the_files_once(store: Store) -> None:
    batch = landed(store, completions(2))
    compute_all(store, batch)
    (begun,) = store.batch_work.to_finalize(9)
    finalize_all(store)
    assert not store.batch_work.finalize(begun)
    assert len(store.files.newest(9, batch.tenant, purpose=FilePurpose.BATCH_OUTPUT)) == 1


def test_result_files_expire_when_asked(store: Store) -> None:
    batch = landed(store, completions(1), output_expires_after_s=3_600)
    compute_all(store, batch)
    finalize_all(store)
    found = now(store, batch)
    assert found.output_file_id is not None
    file = store.files.get(found.output_file_id, batch.tenant)
    assert file.expires_at is not None
    assert found.ended_at is not None
    assert (file.expires_at - found.ended_at).total_seconds() == 3_600
    with pytest.raises(UnknownFileError):
        store.files.get(found.output_file_id, "other")


def test_a_batch_that_is_over_is_not_retried(store: Store) -> None:
    batch = landed(store, completions(2))
    lost = RequestError("internal_error", "could not be planned")
    assert store.backlog.fail_unplanned(batch.job_id, lost) == 2
    for status in (BatchStatus.FINALIZING, BatchStatus.COMPLETED):
        before = now(store, batch)
        assert before.status is status
        with pytest.raises(LifecycleError, match=r"a batch that is over.*make a new batch"):
            store.retries.retry(batch.job_id)
        assert now(store, batch) == before
        finalize_all(store)
    assert len(list(store.results.iterate(batch.job_id))) == 2


IDS = ["plain-1_a.b:c/d e", 'a "quote"', "back\\slash", "tab\t", "밤", "~", "[x]", "%", "x" * 512]


def test_every_custom_id_is_counted_as_it_is_written(store: Store) -> None:
    batch = landed(store, [completion_line(id_, prompt=f"p {id_}") for id_ in IDS])
    compute_all(store, batch)
    page = store.results.lengths(batch.job_id, -1, 100)
    assert page is not None
    assert page.plain.lines == 2  # the first and the last
    assert [shape.record.custom_id for shape in page.others] == IDS[1:-1]
    finalize_all(store)
    lines = content(store, batch, now(store, batch).output_file_id).splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == IDS


def test_lengths_are_told_page_by_page(store: Store) -> None:
    batch = landed(store, [*completions(5), "broken"])
    compute_all(store, batch, refused=1)
    after, plain, others = -1, 0, 0
    while (page := store.results.lengths(batch.job_id, after, 2)) is not None:
        assert page.counted_to == after + 2
        plain, others = plain + page.plain.lines, others + len(page.others)
        after = page.counted_to
    assert (after, plain, others) == (5, 4, 2)
