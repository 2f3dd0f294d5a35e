"""The watcher asks for all calls that are due in one query, and for none when nothing waits."""

import asyncio
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import pytest

from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.watcher import LATEST_S, Watcher
from nightjar.jobs.errors import StoreUnavailableError
from nightjar.jobs.records import CallOutcome


class Rows:
    """Outcomes by job; notes the queries."""

    def __init__(self) -> None:
        self.over: set[str] = set()
        self.queries: list[list[str]] = []
        self.away = False

    def ended(self, job_ids: Collection[str]) -> list[CallOutcome]:
        self.queries.append(list(job_ids))
        if self.away:
            raise StoreUnavailableError("away")
        return [CallOutcome(one, 200, {}, None) for one in job_ids if one in self.over]


@pytest.fixture
def rows() -> Rows:
    return Rows()


def run(rows: Rows, names: list[str], after_s: float) -> float:
    """Wait for calls that end after a while; return how long it took."""

    async def wait() -> float:
        with ThreadPoolExecutor(1) as threads:
            watcher = Watcher(rows.ended, threads)
            began = time.monotonic()
            asyncio.get_running_loop().call_later(after_s, rows.over.update, names)
            found = await asyncio.gather(*map(watcher.wait, names))
            took_s = time.monotonic() - began
            assert [outcome.job_id for outcome in found] == names
            asked = len(rows.queries)
            await asyncio.sleep(4 * LATEST_S)
            assert len(rows.queries) == asked  # nothing waits: nothing is asked
        return took_s

    return asyncio.run(wait())


def test_calls_that_wait_together_are_asked_for_together(rows: Rows) -> None:
    names = [f"job_{number}" for number in range(50)]
    assert run(rows, names, 0.2) >= 0.2
    assert max(map(len, rows.queries)) == len(names)
    assert len(rows.queries) < 45  # not fifty times each


def test_a_call_that_waits_for_long_is_asked_for_less_often(rows: Rows) -> None:
    run(rows, ["job_1"], 1.5)
    # Every 5 ms that would be 300 times.
    assert 5 < len(rows.queries) < 150


def test_a_database_that_is_away_is_asked_again(rows: Rows) -> None:
    rows.away = True

    async def wait() -> CallOutcome:
        with ThreadPoolExecutor(1) as threads:
            watcher = Watcher(rows.ended, threads)
            rows.over.add("job_1")

            def back() -> None:
                rows.away = False

            asyncio.get_running_loop().call_later(0.1, back)
            return await watcher.wait("job_1")

    assert asyncio.run(wait()).job_id == "job_1"
    assert len(rows.queries) <= 4


def test_a_call_that_is_given_up_is_asked_for_no_more(rows: Rows) -> None:
    async def wait() -> None:
        with ThreadPoolExecutor(1) as threads:
            watcher = Watcher(rows.ended, threads)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(watcher.wait("job_1"), 0.1)
            await asyncio.sleep(2 * LATEST_S)
            asked = len(rows.queries)
            rows.over.add("job_2")
            await watcher.wait("job_2")
            assert all(query == ["job_2"] for query in rows.queries[asked:])

    asyncio.run(wait())


def test_calls_that_wait_when_the_process_ends_are_given_up(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightjar.jobs.api.watcher.ENDING_GRACE_S", 0.2)

    async def wait() -> float:
        with ThreadPoolExecutor(1) as threads:
            watcher = Watcher(rows.ended, threads)
            watcher.is_ending = lambda: True
            asyncio.get_running_loop().call_later(0.1, rows.over.add, "job_1")
            began = time.monotonic()
            first, second = await asyncio.gather(
                watcher.wait("job_1"), watcher.wait("job_2"), return_exceptions=True
            )
            assert isinstance(first, CallOutcome)  # its answer came in time
            assert isinstance(second, RefusedRequestError)
            assert (second.status, second.code) == (503, "api_ends")
            return time.monotonic() - began

    assert asyncio.run(wait()) >= 0.2
