"""Open jobs through the client: rows one by one, back-pressure, connections that break."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest

from nightjar import AsyncClient, Client, Generate, OpenJob, RefusedError, RequestError
from nightjar.jobs.accounts import Tenant, TenantLimits
from nightjar.jobs.api import create_app
from nightjar.jobs.records import NewResult
from nightjar.jobs.store import Store
from nightjar.pipeline.client import parts, steps
from tests.api_process import listening
from tests.cutting_proxy import Cut, CuttingProxy


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Store]]:
    folder = tmp_path_factory.mktemp("api")
    with ExitStack() as stack:
        url = f"sqlite:///{folder / 'nightjar.db'}"
        store = Store(url)
        stack.callback(store.close)
        store.migrate()
        app = create_app(store, lambda job_id: None, served_model="tiny")
        yield stack.enter_context(listening(app)), store


@pytest.fixture
def api(system: tuple[str, Store]) -> str:
    """Where it answers."""
    return system[0]


@pytest.fixture
def store(system: tuple[str, Store]) -> Store:
    return system[1]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_FIRST_BACK_OFF_S", 0.02)


def row(number: int) -> Generate:
    return Generate(prompt=f"row {number}", max_tokens=4)


def ids(store: Store, job_id: str) -> list[str]:
    return [one.custom_id for one in store.backlog.queued_requests(job_id, 10_000)]


def _append_and_fail(job: OpenJob) -> None:
    with job:
        job.append(row(0))
        job.flush()
        raise ZeroDivisionError


def answer_what_waits(store: Store, job_id: str) -> None:
    known = [
        NewResult(one.id, 200, {"choices": []})
        for one in store.backlog.queued_requests(job_id, 10_000)
    ]
    store.planning.save_plan(job_id, [], [], answered=known)


def test_rows_of_a_stream_are_appended_and_sealed(api: str, store: Store) -> None:
    with Client(api) as client:
        with client.open(metadata={"from": "stream"}, completion_window="24h") as job:
            for number in range(3):
                job.append(row(number))
            assert (job.rows, job.status().counts.total) == (3, 0)
            job.flush()
            status = job.status()
            assert (status.open, status.counts.total) == (True, 3)
            job.append([row(3), {"prompt": "", "custom_id": "bad"}])
        status = job.status()
    assert (status.open, status.counts.total, status.counts.failed) == (False, 5, 1)
    assert status.metadata == {"from": "stream"}
    assert ids(store, job.id) == [f"row-{number}" for number in range(4)]


def test_full_parts_go_by_themselves(
    api: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_ROWS", 10)
    with Client(api) as client:
        job = client.open()
        job.append(row(number) for number in range(25))
        assert (job.rows, store.jobs.get(job.id).total) == (25, 20)
        job.seal()
        assert ids(store, job.id) == [f"row-{number}" for number in range(25)]
        with pytest.raises(RefusedError, match="takes no more rows") as raised:
            job.append(row(number) for number in range(10))
        assert (raised.value.status, raised.value.code) == (409, "wrong_state")


def test_each_row_is_appended_once_over_breaking_connections(
    api: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_ROWS", 100)
    cuts = [Cut(sent=0), Cut(answered=0), Cut(sent=2_000, reset=True), Cut(answered=40, reset=True)]
    port = int(api.rpartition(":")[2])
    with CuttingProxy(port, *cuts) as proxy, Client(proxy.url, retries=len(cuts)) as client:
        job = client.open(idempotency_key="cut")
        job.append(row(number) for number in range(350))
        job.seal()
        assert proxy.cuts_left == 0
    assert ids(store, job.id) == [f"row-{number}" for number in range(350)]


def test_a_producer_that_failed_goes_on_with_its_key(api: str, store: Store) -> None:
    with Client(api) as client:
        job = client.open(idempotency_key="night")
        with pytest.raises(ZeroDivisionError):
            _append_and_fail(job)
        with client.open(idempotency_key="night") as again:
            assert (again.id, again.rows) == (job.id, 1)
            again.append(row(number) for number in range(again.rows, 3))
            with pytest.raises(RequestError, match="row 3: is of type int"):
                again.append([7])  # type: ignore[list-item]
    assert ids(store, job.id) == ["row-0", "row-1", "row-2"]


def test_two_producers_of_one_job_are_told(api: str) -> None:
    with Client(api) as client:
        one, other = (client.open(idempotency_key="both") for _ in range(2))
        one.append(row(0))
        one.flush()
        other.append(row(1))
        with pytest.raises(RefusedError, match="another producer") as raised:
            other.flush()
        assert raised.value.code == "wrong_place"
        one.cancel()


def test_back_pressure_reaches_the_producer(
    api: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`append` waits while the tenant has too many rows without outcome, and then goes on."""
    monkeypatch.setattr(steps, "LONGEST_WAIT_S", 0.0)
    for earlier in store.jobs.newest(100):
        store.stopping.cancel(earlier.id)
    store.accounts.create_tenant(Tenant("default", limits=TenantLimits(rows_waiting=2)))
    answered = threading.Event()

    def pause(seconds: float) -> None:
        assert seconds > 1
        answer_what_waits(store, job.id)
        answered.set()

    try:
        with Client(api) as client:
            job = client.open()
            for begin in (0, 2):
                monkeypatch.setattr("nightjar.pipeline.client.blocking.time.sleep", pause)
                job.append([row(begin), row(begin + 1)])
                job.flush()
            assert answered.is_set()
            job.append(row(number) for number in range(3))
            with pytest.raises(RefusedError, match="never fits"):
                job.flush()
            job.cancel()
    finally:
        store.accounts.change_tenant("default", rows_waiting=None)


def test_the_same_in_asyncio(api: str, store: Store) -> None:
    async def stream() -> AsyncIterator[Generate]:
        for number in range(4):
            yield row(number)

    async def produce() -> str:
        async with AsyncClient(api) as client, await client.open() as job:
            await job.append(stream())
            await job.append(row(4))
            assert job.rows == 5
            return job.id

    job_id = asyncio.run(produce())
    assert ids(store, job_id) == [f"row-{number}" for number in range(5)]
    assert not store.jobs.get(job_id).takes_rows
