"""Schedules by the Python client: made, changed, steered, run and watched over a real API."""

import asyncio
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from nightjar import AsyncClient, Client, RefusedError, RequestError, WaitTimeoutError
from nightjar.jobs.api import create_app
from nightjar.jobs.schedule_records import FAILING_AFTER, RunEnd, RunState, WhenRunning
from nightjar.jobs.store import Store
from nightjar.pipeline.client import pages, steps
from nightjar.pipeline.client.errors import ClientError
from tests.api_process import listening
from tests.cutting_proxy import Cut, CuttingProxy
from tests.schedules import Clock, add_schedule

NOW = Clock(datetime.now(UTC))
TASK = "nightly/rank.toml"


@pytest.fixture(scope="module")
def store(migrated_sqlite_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    path = tmp_path_factory.mktemp("store") / "nightjar.db"
    shutil.copy(migrated_sqlite_file, path)
    opened = Store(f"sqlite:///{path}")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def api_url(store: Store) -> Iterator[str]:
    with listening(create_app(store, lambda job_id: None)) as url:
        yield url


@pytest.fixture
def client(api_url: str) -> Iterator[Client]:
    with Client(api_url) as opened:
        yield opened


def end_run(store: Store, state: RunState, reason: str | None = None) -> None:
    """End the run that waits, as the process that runs task files does."""
    moment = datetime.now(UTC)
    claimed = store.schedule_work.claim("runner", moment)
    assert claimed is not None
    assert store.schedule_work.finish(claimed, RunEnd(state, reason, 3, 2, 1), moment)


def test_a_schedule_from_its_making_to_its_end(client: Client, store: Store) -> None:
    schedules = client.schedules
    made = schedules.put("rank", cron="0 2 * * *", time_zone="Asia/Seoul", task=TASK, file=None)
    assert (made.name, made.task, made.deadline, made.keep_results) == ("rank", TASK, "1d", None)
    assert made.next_at is not None
    assert schedules.put("rank", cron="0 2 * * *", time_zone="Asia/Seoul", task=TASK) == made
    changed = schedules.change(made.id, jitter="15m", keep_results="7d")
    assert (changed.jitter, changed.keep_results, changed.cron) == ("15m", "7d", "0 2 * * *")
    assert schedules.change("rank", keep_results=None).keep_results is None
    assert schedules.pause("rank").paused
    run = schedules.run("rank")
    assert (run.trigger, run.state, run.is_over) == ("manual", "waiting", False)
    with pytest.raises(RefusedError) as refused:
        schedules.run("rank")
    assert (refused.value.status, refused.value.code) == (409, "wrong_state")
    with pytest.raises(WaitTimeoutError, match="is waiting after 0 s; it goes on"):
        schedules.wait(run, timeout=0)
    end_run(store, RunState.SUCCEEDED)
    ended = schedules.wait(run, timeout=30)
    assert (ended.id, ended.succeeded, ended.counts.failed) == (run.id, True, 1)
    resumed = schedules.resume("rank")
    assert (resumed.paused, resumed.last_run, schedules.get("rank")) == (False, ended, resumed)
    assert list(schedules.runs("rank")) == [ended]
    assert list(schedules.list()) == [resumed]
    assert schedules.delete("rank") == resumed
    with pytest.raises(RefusedError, match="404"):
        schedules.delete("rank")
    told = [one.action for one in schedules.changes(schedule_id=made.id)]
    assert told == ["deleted", "resumed", "run_now", "paused", "updated", "updated", "created"]
    assert [one.action for one in schedules.changes()] == told


def test_what_is_wrong_is_told(client: Client, store: Store) -> None:
    failing = add_schedule(store, NOW, "failing")
    assert client.schedules.check().ok
    for _ in range(FAILING_AFTER):
        run = client.schedules.run("failing")
        end_run(store, RunState.FAILED, "no row succeeded")
    assert client.schedules.wait(run).reason == "no row succeeded"
    found = client.schedules.check()
    assert (found.ok, [one.schedule_id for one in found.troubles]) == (False, [failing.id])
    assert "no row succeeded" in found.troubles[0].trouble
    assert client.schedules.get("failing").failing
    client.schedules.delete("failing")
    with pytest.raises(RefusedError, match="did you mean jitter"):
        client.schedules.put("rank", cron="0 2 * * *", task=TASK, jiter="5m")  # type: ignore[call-arg]
    with pytest.raises(RefusedError) as refused:
        client.schedules.put("rank", cron="0 2 30 2 *", task=TASK)
    assert (refused.value.code, refused.value.param) == ("invalid_body", "body.cron")
    with pytest.raises(RequestError, match="cannot be sent"):
        client.schedules.put("rank", cron=object(), task=TASK)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="name of a schedule is empty"):
        client.schedules.get("")
    with pytest.raises(ClientError):  # a name that would be another route
        client.schedules.get("changes")
    with pytest.raises(RefusedError, match="404"):
        client.schedules.wait(run)
    assert list(client.schedules.list()) == []


def test_pages_go_on_to_the_last(
    client: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PAGE", 2)
    for number in range(5):
        add_schedule(store, NOW, f"page-{number}")
    for _ in range(3):
        run = client.schedules.run("page-0")
        end_run(store, RunState.SUCCEEDED)
    listed = list(client.schedules.list())
    assert [one.id for one in listed] == sorted((one.id for one in listed), reverse=True)
    assert {one.name for one in listed} == {f"page-{number}" for number in range(5)}
    runs = list(client.schedules.runs("page-0"))
    assert [one.id for one in runs] == sorted((one.id for one in runs), reverse=True)
    assert (len(runs), runs[0].id) == (3, run.id)
    assert client.schedules.wait(runs[-1]) == runs[-1]  # on the second page
    for number in range(5):
        client.schedules.delete(f"page-{number}")


def test_a_connection_that_breaks_makes_one_run(
    api_url: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it breaks: before the call, in it, and in its answer."""
    monkeypatch.setattr(steps, "_FIRST_BACK_OFF_S", 0.01)
    port = int(api_url.rpartition(":")[2])
    lost = 0
    for number, answered in enumerate(range(0, 1_200, 150)):
        schedule = add_schedule(store, NOW, f"cut-{number}", when_still_running=WhenRunning.QUEUE)
        with CuttingProxy(port, Cut(answered=answered)) as proxy, Client(proxy.url) as client:
            run = client.schedules.run(schedule.name)
            lost += proxy.connections > 1
            proxy.cut_next(Cut(answered=answered))
            gone = client.schedules.delete(schedule.name)
        assert gone.last_run == run
        told = [one.action for one in store.schedules.changes("default", 9, None, schedule.id)]
        assert told == ["deleted", "run_now", "created"]
    assert lost >= 5


def test_an_api_that_is_away_is_told_after_all_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_FIRST_BACK_OFF_S", 0.01)
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.method)
        if request.method == "GET":
            page = {"object": "list", "data": [], "has_more": False, "next_after": None}
            return httpx.Response(200, json=page)
        return httpx.Response(503, json={"error": {"code": "unavailable", "message": "away"}})

    transport = httpx.MockTransport(answer)
    with (
        Client("http://night.example", transport=transport, retries=2) as client,
        pytest.raises(RefusedError, match="503: away"),
    ):
        client.schedules.run("rank")
    assert seen == ["GET", "POST"] * 3


def test_the_same_in_asyncio(api_url: str, store: Store) -> None:
    async def all_of_it() -> None:
        async with AsyncClient(api_url) as client:
            schedules = client.schedules
            made = await schedules.put("night", cron="0 2 * * *", task=TASK)
            assert (await schedules.change("night", priority=3)).priority == 3
            assert (await schedules.pause("night")).paused
            assert not (await schedules.resume("night")).paused
            run = await schedules.run("night")
            await asyncio.to_thread(end_run, store, RunState.SUCCEEDED)
            assert (await schedules.wait(run, timeout=30)).succeeded
            assert [one.id async for one in schedules.runs("night")] == [run.id]
            assert [one.id async for one in schedules.list()] == [made.id]
            assert (await schedules.get(made.id)).name == "night"
            assert (await schedules.check()).ok
            await schedules.delete("night")
            actions = [one.action async for one in schedules.changes(made.id)]
            assert actions[:2] == ["deleted", "run_now"]

    asyncio.run(all_of_it())
