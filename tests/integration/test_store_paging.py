"""Pages that a client can follow while the job runs: each result once, and none left out."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from nightjar.jobs.errors import UnknownJobError
from nightjar.jobs.records import NewJob, NewResult, RejectedRow
from nightjar.jobs.store import Store
from nightjar.jobs.store.outcomes import Outcomes
from nightjar.jobs.store.tables import job as job_table
from nightjar.jobs.store.tables import landing, result
from tests.jobs import planned, submit
from tests.outcomes import answers, claim, compute


def followed(store: Store, job_id: str, limit: int = 7, outcome="all") -> list[int]:
    """Row indexes in the order of landing, by asking on until the job is over."""
    seen, after, complete = [], -1, False
    while not complete:
        page = store.results.page(job_id, order="landed", after=after, limit=limit, outcome=outcome)
        seen += [record.index for record in page.records]
        after, complete = page.next_after, page.complete
    return seen


def test_a_client_that_follows_a_running_job_sees_each_row_once(store: Store) -> None:
    """Workers land from the last to the first and at once; the client never looks back."""
    job_id, refs = planned(store, 240, each=3)
    begun = threading.Barrier(4)

    def work(number: int) -> None:
        claims = [claim(store, ref, f"w{number}") for ref in reversed(refs[number::3])]
        begun.wait()
        for claimed in claims:
            assert store.leases.finish(claimed.id, claimed.epoch, f"w{number}", answers(claimed))

    with ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(work, number) for number in range(3)]
        begun.wait()
        seen = followed(store, job_id)
        for worker in workers:
            worker.result()
    assert sorted(seen) == list(range(240))
    assert seen != sorted(seen)
    assert followed(store, job_id, limit=100) == seen  # the order stands


def test_a_landing_that_commits_late_comes_late(postgres_url: str) -> None:
    """Two transactions land at once: neither place is seen before the one in front of it."""
    store = Store(postgres_url)
    store.migrate()
    job_id, refs = planned(store, 2)
    first, second = (claim(store, ref) for ref in refs)
    entered, go_on = threading.Event(), threading.Event()
    write = store.database.write

    def land_slowly() -> bool:
        def work(connection: sa.Connection) -> None:
            indexes = {request.id: request.index for request in first.requests}
            Outcomes(store.database).land(connection, job_id, answers(first), indexes)
            entered.set()
            assert go_on.wait(20)

        write(work)
        return True

    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(land_slowly)
        assert entered.wait(20)
        fast = pool.submit(store.leases.finish, second.id, second.epoch, "worker", answers(second))
        with pytest.raises(TimeoutError):
            fast.result(0.3)  # it waits for the job's row, so its place is behind
        page = store.results.page(job_id, order="landed")
        assert (page.records, page.next_after, page.has_more) == ([], -1, False)
        go_on.set()
        assert slow.result(20) is True
        assert fast.result(20) is True
    page = store.results.page(job_id, order="landed")
    assert [record.index for record in page.records] == [0, 1]
    store.close()


def test_followers_and_what_nobody_computed_are_in_the_order(store: Store) -> None:
    job_id = submit(store, [{"prompt": "a", "temperature": 0}] * 3, merge_equal=True)
    assert store.stopping.cancel(job_id).is_over
    assert sorted(followed(store, job_id)) == [0, 1, 2]
    with store.jobs.submit(NewJob("tiny")) as submission:
        submission.add(RejectedRow(n, n + 1, None, "invalid_json", "bad") for n in range(2_500))
    assert followed(store, submission.job_id, limit=900) == list(range(2_500))


def test_a_retried_row_stands_where_it_landed_again(store: Store) -> None:
    job_id, refs = planned(store, 4)
    for ref in refs:
        claimed = claim(store, ref)
        results = answers(claimed)
        if claimed.requests[0].index == 1:
            results = [NewResult.failure(results[0].request_id, "x", "ours", status=500)]
        store.leases.finish(ref.id, 0, "worker", results)
    before = store.results.page(job_id, order="landed")
    assert ([r.index for r in before.records], before.complete) == ([0, 1, 2, 3], True)
    assert store.retries.retry(job_id) == 1
    page = store.results.page(job_id, order="landed", after=before.next_after)
    assert (page.records, page.complete) == ([], False)
    assert store.stopping.cancel(job_id).is_over
    page = store.results.page(job_id, order="landed", after=before.next_after)
    assert ([r.index for r in page.records], page.complete) == ([1], True)
    assert followed(store, job_id, limit=2) == [0, 2, 3, 1]


def test_what_the_version_before_landed_gets_its_place(store: Store) -> None:
    job_id, refs = planned(store, 6, each=2)
    compute(store, refs[1])
    with store.database.engine.begin() as connection:  # as its processes leave them
        connection.execute(sa.update(result).values(landing=None))
        connection.execute(sa.delete(landing))
        connection.execute(sa.update(job_table).values(landed=0))
    compute(store, refs[2])
    compute(store, refs[0])
    assert followed(store, job_id) == [4, 5, 0, 1, 2, 3]
    assert followed(store, job_id) == [4, 5, 0, 1, 2, 3]


@pytest.mark.parametrize(("outcome", "rows"), [("failed", [1]), ("succeeded", [2, 0])])
def test_one_outcome_alone_in_the_order_of_landing(store: Store, outcome, rows) -> None:
    job_id, refs = planned(store, 3)
    for ref in reversed(refs):
        claimed = claim(store, ref)
        results = answers(claimed)
        if claimed.requests[0].index == 1:
            results = [NewResult.failure(results[0].request_id, "refused", "no")]
        store.leases.finish(ref.id, 0, "worker", results)
    assert followed(store, job_id, limit=1, outcome=outcome) == rows


def test_a_page_in_row_order_stops_where_a_row_is_missing(store: Store) -> None:
    job_id, refs = planned(store, 6)
    for number in (0, 1, 3, 4, 5):
        compute(store, refs[number])
    page = store.results.page(job_id, limit=2)
    assert ([r.index for r in page.records], page.has_more, page.complete) == ([0, 1], False, False)
    assert store.results.page(job_id, limit=1).has_more
    page = store.results.page(job_id, after=page.next_after)
    assert (page.records, page.next_after, page.has_more) == ([], 1, False)
    assert (page.waits_for_row, page.complete) == (2, False)
    failed = store.results.page(job_id, outcome="failed")
    assert (failed.records, failed.next_after, failed.waits_for_row) == ([], 1, 2)
    compute(store, refs[2])
    page = store.results.page(job_id, after=page.next_after)
    assert ([r.index for r in page.records], page.complete) == ([2, 3, 4, 5], True)
    assert page.waits_for_row is None


def test_following_in_row_order_loses_nothing_either(store: Store) -> None:
    job_id, refs = planned(store, 30, each=2)
    seen, after = [], -1
    for ref in reversed(refs):
        page = store.results.page(job_id, after=after, limit=3)
        seen, after = seen + [r.index for r in page.records], page.next_after
        compute(store, ref)
    complete = False
    while not complete:
        page = store.results.page(job_id, after=after, limit=3)
        seen, after, complete = (
            seen + [r.index for r in page.records],
            page.next_after,
            page.complete,
        )
    assert seen == list(range(30))


@pytest.mark.parametrize("order", ["row", "landed"])
def test_a_page_is_bounded_in_bytes(store: Store, order) -> None:
    """Bytes, not characters; and a row larger than the budget still comes, alone."""
    job_id, refs = planned(store, 8)
    for ref in refs:
        claimed = claim(store, ref)
        size = 40_000 if claimed.requests[0].index == 5 else 5_000
        body = {"text": "밤" * size}
        store.leases.finish(ref.id, 0, "worker", [NewResult(claimed.requests[0].id, 200, body)])
    pages, after, complete = [], -1, False
    while not complete:
        page = store.results.page(job_id, order=order, after=after, max_bytes=50_000)
        pages.append([record.index for record in page.records])
        after, complete = page.next_after, page.complete
        bodies = [json.dumps(record.body, ensure_ascii=False) for record in page.records]
        assert len(bodies) == 1 or len("".join(bodies).encode()) <= 50_000
    assert pages == [[0, 1, 2], [3, 4], [5], [6, 7]]
    assert len(list(store.results.iterate(job_id))) == 8


def test_what_errors_say_counts_as_bytes_too(store: Store) -> None:
    job_id, (ref,) = planned(store, 5, each=5)
    claimed = claim(store, ref)
    failures = [NewResult.failure(one.id, "broken", "x" * 1_000) for one in claimed.requests]
    assert store.leases.finish(ref.id, ref.epoch, "worker", failures)
    page = store.results.page(job_id, max_bytes=3_000)
    assert (len(page.records), page.has_more) == (2, True)


def test_a_page_of_an_unknown_job(store: Store) -> None:
    for order in ("row", "landed"):
        with pytest.raises(UnknownJobError):
            store.results.page("job_nothing", order=order)


def test_rejected_rows_land_in_the_order_of_their_own_job(store: Store) -> None:
    def submitted() -> str:
        with store.jobs.submit(NewJob("tiny")) as submission:
            submission.add([RejectedRow(0, 1, None, "invalid_json", "is not JSON")])
        return submission.job_id

    first, second = submitted(), submitted()
    for job_id in (first, second):
        page = store.results.page(job_id, order="landed")
        assert [record.index for record in page.records] == [0]
        assert (page.next_after, page.complete) == (0, True)
