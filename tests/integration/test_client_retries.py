"""Connections that break in the middle of a request or of an answer: nothing happens twice."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nightjar import AsyncClient, Client, Generate, RefusedError, UnreachableError
from nightjar.jobs.store import Store
from nightjar.pipeline.client import steps
from tests.api_process import Api, running_api
from tests.cutting_proxy import Cut, CuttingProxy
from tests.databases import SQLITE_FIRST, fresh_postgres_database
from tests.jobs import planned
from tests.outcomes import compute
from tests.services import free_port

ROWS = 3_000  # about 400 kB

CUTS = [
    Cut(sent=0),
    Cut(sent=100),  # within the headers
    Cut(sent=5_000),  # within the rows
    Cut(sent=200_000, reset=True),
    Cut(answered=0),  # the job has landed, and nobody says so
    Cut(answered=40, reset=True),
    Cut(answered=200),  # within the answer's body
]


@pytest.fixture(scope="module", params=SQLITE_FIRST)
def system(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Api, Store]]:
    folder = tmp_path_factory.mktemp("api")
    with ExitStack() as stack:
        url = f"sqlite:///{folder / 'nightjar.db'}"
        if request.param == "postgresql":
            server = request.getfixturevalue("postgres_server")
            url = stack.enter_context(fresh_postgres_database(server))
        store = Store(url)
        stack.callback(store.close)
        store.migrate()
        named = {"NIGHTJAR_MODEL_NAME": "tiny"}
        yield stack.enter_context(running_api(url, tiny_model, folder, **named)), store


@pytest.fixture
def api(system: tuple[Api, Store]) -> Api:
    return system[0]


@pytest.fixture
def store(system: tuple[Api, Store]) -> Store:
    return system[1]


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_FIRST_BACK_OFF_S", 0.02)


def port(api: Api) -> int:
    return int(api.url.rpartition(":")[2])


def ids(store: Store) -> set[str]:
    return {job.id for job in store.jobs.newest(100)}


def requests() -> Iterator[Generate]:
    """Requests of an iterator that can be read once."""
    for n in range(ROWS):
        yield Generate(prompt=f"{n} {'x' * 60}", max_tokens=4, custom_id=f"night-{n}")


def test_a_submit_over_breaking_connections_makes_one_job(api: Api, store: Store) -> None:
    before = ids(store)
    with CuttingProxy(port(api), *CUTS) as proxy, Client(proxy.url, retries=len(CUTS)) as client:
        job = client.submit(requests())
        assert (proxy.cuts_left, proxy.connections) == (0, len(CUTS) + 1)
        status = job.status()
    assert ids(store) - before == {job.id}
    assert (status.counts.total, status.counts.failed) == (ROWS, 0)
    queued = store.backlog.queued_requests(job.id, ROWS)
    assert [request.custom_id for request in queued] == [f"night-{n}" for n in range(ROWS)]


def test_an_asynchronous_submit_makes_one_job_too(api: Api, store: Store) -> None:
    async def rows() -> AsyncIterator[Generate]:
        for request in requests():
            yield request

    async def submit(url: str) -> str:
        async with AsyncClient(url, retries=len(CUTS)) as client:
            return (await client.submit(rows())).id

    before = ids(store)
    with CuttingProxy(port(api), *CUTS) as proxy:
        job_id = asyncio.run(submit(proxy.url))
        assert proxy.cuts_left == 0
    assert ids(store) - before == {job_id}
    assert store.jobs.get(job_id).total == ROWS


def test_two_submits_of_the_same_rows_are_two_jobs(api: Api, store: Store) -> None:
    before = ids(store)
    with Client(api.url) as client:
        made = {client.submit([Generate(prompt="a")]).id for _ in range(2)}
        kept = {client.submit([Generate(prompt="a")], idempotency_key="k").id for _ in range(2)}
        with pytest.raises(RefusedError, match="409: this Idempotency-Key made job"):
            client.submit([Generate(prompt="b")], idempotency_key="k")
    assert (len(made), len(kept)) == (2, 1)
    assert ids(store) - before == made | kept


def test_each_result_comes_once_over_breaking_connections(api: Api, store: Store) -> None:
    job_id, refs = planned(store, 60, each=10)
    rng = random.Random(5)
    seen = []
    with CuttingProxy(port(api)) as proxy, Client(proxy.url) as client:
        for ref in refs[:3]:
            compute(store, ref)
        follow = client.job(job_id).follow(every_s=0.02)
        for _ in range(25):
            seen.append(next(follow).custom_id)
        for ref in refs[3:]:
            seen += [next(follow).custom_id for _ in range(5)]
            proxy.cut_next(Cut(answered=rng.randrange(3_000)), Cut(sent=rng.randrange(150)))
            compute(store, ref)
        seen += [one.custom_id for one in follow]
        assert proxy.cuts_left == 0
        proxy.cut_next(Cut(answered=700), Cut(answered=5_000))
        ordered = [one.custom_id for one in client.job(job_id).results()]
    assert sorted(filter(None, seen)) == sorted(f"row-{n}" for n in range(60))
    assert ordered == [f"row-{n}" for n in range(60)]


@pytest.mark.slow
def test_a_client_gives_up_after_its_retries(api: Api) -> None:
    cuts = [Cut(answered=0)] * 9
    with CuttingProxy(port(api), *cuts) as proxy, Client(proxy.url, retries=2) as client:
        with pytest.raises(UnreachableError, match=r"/v1/jobs/job_1: .*is `nightjar api` there"):
            client.job("job_1").status()
        assert proxy.connections == 3
    with (
        Client(f"http://127.0.0.1:{free_port()}", retries=1) as client,
        pytest.raises(UnreachableError, match=r"POST http.*/v1/jobs: "),
    ):
        client.submit([Generate(prompt="a")])
