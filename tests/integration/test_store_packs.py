"""Bodies and answers in packs: what is stored, what is read, and when it goes."""

from typing import Any

import pytest
import sqlalchemy as sa

from nightjar.jobs.errors import StoreError
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.purge_records import PurgeScope
from nightjar.jobs.records import (
    EncodedRequest,
    NewJob,
    NewMicroBatch,
    NewRequest,
    NewResult,
    PlanningRange,
    RejectedRow,
)
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store, answer_packs, body_rows, packs
from nightjar.jobs.store.parts import part_of_job
from nightjar.jobs.store.tables import answer_pack, body_pack, request_body, result
from nightjar.jobs.workers import Crash
from tests.jobs import planned, submit
from tests.outcomes import answers, claim, compute


def bodies(count: int, size: int = 10) -> list[dict[str, object]]:
    return [{"prompt": f"{n} ".ljust(size, "."), "max_tokens": 4} for n in range(count)]


def rows_of(store: Store, table: sa.Table) -> list[sa.Row]:
    columns = [column for column in table.c if column.name != "packed"]
    with store.database.reading() as connection:
        return list(connection.execute(sa.select(*columns).order_by(*table.primary_key)).all())


def test_a_job_has_a_pack_for_its_rows(store: Store) -> None:
    job_id = submit(store, bodies(packs.MOST_TEXTS + 2))
    found = rows_of(store, body_pack)
    assert [(row.first_row, row.rows) for row in found] == [(0, 1_000), (1_000, 2)]
    assert {(row.job_id, row.part) for row in found} == {(job_id, part_of_job(job_id))}
    queued = store.backlog.queued_requests(job_id, 9_999)
    assert [one.body["prompt"].split()[0] for one in queued] == [str(n) for n in range(1_002)]
    assert sum(one.size for one in queued) == sum(row.bytes for row in found)
    assert rows_of(store, request_body) == []


def test_rows_are_read_from_the_middle_of_packs(store: Store) -> None:
    job_id = submit(store, bodies(2_100))
    within = PlanningRange(job_id, 990, 2_010, is_lowest=True)
    queued = store.backlog.queued_requests(job_id, 9_999, within=within)
    assert [one.index for one in queued] == list(range(990, 2_010))
    assert all(one.body["prompt"].startswith(f"{one.index} ") for one in queued)
    some = [queued[at].id for at in (1_019, 0, 12)]
    assert [store.previews.asked(some)[id_]["prompt"].split()[0] for id_ in some] == [
        *("2009", "990", "1002")
    ]


def test_no_more_packs_are_read_than_the_bytes_allow(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(store, bodies(40, 80_000))  # 13 rows a pack
    assert [row.rows for row in rows_of(store, body_pack)] == [13, 13, 13, 1]
    unpacked: list[bytes] = []

    def unpack(packed: bytes) -> list[bytes]:
        unpacked.append(packed)
        return packs.unpack(packed)

    monkeypatch.setattr(body_rows, "unpack", unpack)
    assert len(store.backlog.queued_requests(job_id, 40, 400_000)) == 4
    assert len(unpacked) == 1
    assert len(store.backlog.queued_requests(job_id, 40, 2_400_000)) == 29
    assert len(unpacked) == 1 + 3  # the pack in which the limit lies is cut
    assert len(store.backlog.queued_requests(job_id, 40, 1)) == 1


def test_packs_between_rows_that_lie_far_apart_are_not_looked_at(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "MOST_TEXTS", 4)
    monkeypatch.setattr(body_rows, "MOST_TEXTS", 4)
    queued = store.backlog.queued_requests(submit(store, bodies(40)), 99)
    looked_for: list[tuple[int, int]] = []

    def note(*given: Any) -> None:
        if "body_pack.bytes" in given[2]:
            (named,) = given[4].compiled_parameters
            looked_for.append((named["first"], named["last"]))

    sa.event.listen(store.database.engine, "before_cursor_execute", note)
    found = store.previews.asked([queued[0].id, queued[3].id, queued[30].id])
    assert [body["prompt"].split()[0] for body in found.values()] == ["0", "3", "30"]
    assert looked_for == [(-3, 3), (27, 30)]


def test_a_body_behind_the_packs_is_found_alone(store: Store) -> None:
    """As a process of the version before appends it."""
    opened, _ = store.appending.open(NewJob("tiny", merge_equal=False))
    for first, size in ((0, 3), (3, 1)):
        rows = [
            NewRequest(
                n, n + 1, None, RequestKind.GENERATE, validate_body(RequestKind.GENERATE, one)
            )
            for n, one in enumerate(bodies(size), first)
        ]
        store.appending.append(opened.id, first, rows, f"digest {first}")
    *_, last = store.backlog.queued_requests(opened.id, 9)

    def move(connection: sa.Connection) -> None:
        text = '{"prompt":"alone","max_tokens":4}'
        connection.execute(sa.insert(request_body).values(request_id=last.id, body=text))
        connection.execute(sa.delete(body_pack).where(body_pack.c.first_row == 3))

    store.database.write(move)
    assert store.backlog.queued_requests(opened.id, 9)[3].body["prompt"] == "alone"


def test_a_row_whose_body_is_gone_is_an_error(store: Store) -> None:
    """A database that was restored in part: the row is not planned as an empty one."""
    job_id = submit(store, bodies(3))
    store.database.write(lambda connection: connection.execute(sa.delete(body_pack)))
    with pytest.raises(StoreError, match=f"row 0 of job {job_id} has no body"):
        store.backlog.queued_requests(job_id, 9)


def test_a_body_that_is_larger_than_a_pack_is_alone(store: Store) -> None:
    rows = [*bodies(2), *bodies(1, packs.MOST_BYTES + 1), *bodies(2)]
    job_id = submit(store, rows)
    assert [row.rows for row in rows_of(store, body_pack)] == [2, 1, 2]
    queued = store.backlog.queued_requests(job_id, 9)
    assert [len(one.body["prompt"]) for one in queued] == [10, 10, packs.MOST_BYTES + 1, 10, 10]
    assert store.previews.asked([one.id for one in queued]).keys() == {
        one.id for one in queued if one.index != 2
    }


def test_rejected_rows_have_an_empty_place(store: Store) -> None:
    body = validate_body(RequestKind.GENERATE, {"prompt": "a", "max_tokens": 4})
    rejected = RejectedRow(1, 2, "second", "invalid_json", "not JSON", None)
    with store.jobs.submit(NewJob("tiny", merge_equal=False)) as submission:
        submission.add(
            [
                NewRequest(0, 1, "first", RequestKind.GENERATE, body),
                rejected,
                NewRequest(2, 3, "first", RequestKind.GENERATE, body),  # of a known custom_id
                NewRequest(3, 4, "last", RequestKind.GENERATE, body),
            ]
        )
    assert (submission.accepted, submission.rejected) == (2, 2)
    queued = store.backlog.queued_requests(submission.job_id, 9)
    assert [(one.index, one.body["prompt"]) for one in queued] == [(0, "a"), (3, "a")]


def test_a_job_of_rejected_rows_alone_has_no_pack(store: Store) -> None:
    with store.jobs.submit(NewJob("tiny")) as submission:
        submission.add([RejectedRow(0, 1, None, "invalid_json", "not JSON", None)])
    assert rows_of(store, body_pack) == []


def planned_with_what_is_asked(store: Store, count: int) -> str:
    """A job of one micro-batch, whose plan has what workers need."""
    job_id = submit(store, bodies(count))
    queued = store.backlog.queued_requests(job_id, count)
    encoded = [
        EncodedRequest(one.id, [[one.index]], asked={"max_tokens": one.index, "temperature": 0.5})
        for one in queued
    ]
    batch = NewMicroBatch(RequestKind.GENERATE, 32, [one.id for one in queued], count)
    store.planning.save_plan(job_id, encoded, [batch])
    return job_id


def test_workers_read_what_is_asked_and_no_body(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_with_what_is_asked(store, 5)
    read: list[object] = []
    monkeypatch.setattr(body_rows.Bodies, "read", lambda *given: read.append(given))
    for _ in range(4):  # also each half of what crashed, until each is alone
        refs = store.planning.dispatchable(9)
        requests = [one for ref in refs for one in claim(store, ref, "dead").requests]
        assert {one.index: one.body["max_tokens"] for one in requests} == {n: n for n in range(5)}
        assert all((one.body["temperature"], one.body["top_k"]) == (0.5, 0) for one in requests)
        store.suspects.add_owner("dead", Crash("it died", allowed=9))
    assert len(refs) == 5
    assert read == []


def test_answers_that_land_together_are_one_pack(store: Store) -> None:
    job_id, (ref, few) = planned(store, 8, each=5)
    claimed = claim(store, ref)
    results = answers(claimed)
    results[0] = NewResult.failure(results[0].request_id, "broken", "no", status=500)
    assert store.leases.finish(ref.id, ref.epoch, "worker", results)
    assert compute(store, few)
    assert [row.id for row in rows_of(store, answer_pack)] == [claimed.requests[1].id]
    stored = rows_of(store, result)
    assert [row.pack_place for row in stored] == [None, 0, 1, 2, 3, None, None, None]
    assert [row.body is None for row in stored] == [True] * 5 + [False] * 3
    records = store.results.read(job_id)
    assert [record.body and record.body["text"] for record in records] == [
        None,
        *(f"answer to row-{n}" for n in range(1, 8)),
    ]
    assert [row.body_bytes for row in stored[1:5]] == [len('{"text":"answer to row-1"}')] * 4
    raw = list(store.results.iterate_raw(job_id))
    assert bytes(raw[4].body or b"") == b'{"text":"answer to row-4"}'
    lengths = store.results.lengths(job_id, -1, 99)
    assert lengths is not None
    assert lengths.plain.lines == 7


def test_pages_are_bounded_by_the_bodies_that_packs_hold(store: Store) -> None:
    job_id, (ref,) = planned(store, 6, each=6)
    claimed = claim(store, ref)
    results = [NewResult(one.id, 200, {"text": "é" * 1_000}) for one in claimed.requests]
    assert store.leases.finish(ref.id, ref.epoch, "worker", results)
    page = store.results.page(job_id, max_bytes=5_000)
    assert (len(page.records), page.has_more) == (2, True)


@pytest.mark.parametrize("most_kept", [answer_packs.MOST_KEPT_BYTES, 1])
def test_a_reader_that_goes_on_unpacks_each_pack_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, most_kept: int
) -> None:
    """Rows of one page are in all micro-batches of their chunk, which have like lengths."""
    job_id = submit(store, bodies(60))
    queued = store.backlog.queued_requests(job_id, 60)
    mixed = [[one.id for one in queued[first::6]] for first in range(6)]
    batches = [NewMicroBatch(RequestKind.GENERATE, 32, ids, 10) for ids in mixed]
    encoded = [EncodedRequest(one.id, [[1]]) for one in queued]
    for ref in store.planning.save_plan(job_id, encoded, batches):
        assert compute(store, ref)
    unpacked: list[bytes] = []

    def unpack(packed: bytes) -> list[bytes]:
        unpacked.append(packed)
        return packs.unpack(packed)

    monkeypatch.setattr(answer_packs, "unpack", unpack)
    monkeypatch.setattr(answer_packs, "MOST_KEPT_BYTES", most_kept)
    records = list(store.results.iterate(job_id, page_size=12))
    assert [one.body and one.body["text"] for one in records] == [
        f"answer to row-{n}" for n in range(60)
    ]
    pages, all_packs = 5, 6
    assert len(unpacked) == (all_packs if most_kept > 1 else all_packs * pages - (pages - 1))
    assert len(list(store.results.iterate_raw(job_id))) == 60


def test_a_large_answer_is_in_a_pack_of_its_own(store: Store) -> None:
    job_id, (ref,) = planned(store, 5, each=5)
    claimed = claim(store, ref)
    texts = ["a", "b" * (packs.MOST_BYTES + 1), "c", "d", "e"]
    results = [
        NewResult(one.id, 200, {"text": text})
        for one, text in zip(claimed.requests, texts, strict=True)
    ]
    assert store.leases.finish(ref.id, ref.epoch, "worker", results)
    assert len(rows_of(store, answer_pack)) == 3
    assert [record.body["text"] for record in store.results.read(job_id) if record.body] == texts


def test_followers_share_the_pack_of_their_leader(store: Store) -> None:
    rows = [{"prompt": f"{n % 4}", "max_tokens": 4, "temperature": 0} for n in range(12)]
    job_id = submit(store, rows, merge_equal=True)
    queued = store.backlog.queued_requests(job_id, 12)
    batch = NewMicroBatch(RequestKind.GENERATE, 32, [one.id for one in queued], 4)
    encoded = [EncodedRequest(one.id, [[1]]) for one in queued]
    (ref,) = store.planning.save_plan(job_id, encoded, [batch])
    assert compute(store, ref)
    assert len(rows_of(store, answer_pack)) == 1
    assert [record.body["text"] for record in store.results.read(job_id) if record.body] == [
        f"answer to row-{n % 4}" for n in range(12)
    ]


def test_answers_are_stored_alone_beside_an_api_of_the_version_before(store: Store) -> None:
    url = store.database.url.render_as_string(hide_password=False)
    _, (ref,) = planned(store, 5, each=5)
    plain = Store(url, packs_answers=False)
    assert compute(plain, ref)
    plain.close()
    assert rows_of(store, answer_pack) == []
    assert [row.body for row in rows_of(store, result)] == [
        f'{{"text":"answer to row-{n}"}}' for n in range(5)
    ]


def test_packs_go_with_their_rows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightjar.jobs.store.purging.BYTES_PER_STEP", 200)
    monkeypatch.setattr(packs, "MOST_TEXTS", 4)
    job_id, refs = planned(store, 24, each=6)
    for ref in refs:
        assert compute(store, ref)
    store.shares.settle()
    kept, _ = planned(store, 6, each=6)
    assert len(rows_of(store, answer_pack)) == 8
    store.retention.sweep(PurgeScope(job_id=job_id))
    assert rows_of(store, answer_pack) == []
    assert {row.job_id for row in rows_of(store, body_pack)} == {kept}
