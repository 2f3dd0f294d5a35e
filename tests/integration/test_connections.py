"""How many connections each process of a deployment holds to PostgreSQL while it computes."""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from nightjar.jobs.store import Store
from tests.api_process import running_api
from tests.jobs import submit_for
from tests.model_deployment import FAKE, running
from tests.postgres_schemas import administering
from tests.processes import wait_until

ROWS = 200
CALLS = 32
BUSY = FAKE | {
    "NIGHTJAR_MICRO_BATCH_REQUESTS": "2",
    "NIGHTJAR_WORKER_THREADS": "8",
    "NIGHTJAR_HEARTBEAT_S": "0.05",
    "NIGHTJAR_DISPATCH_WINDOW": "64",
}
OPEN = sa.text(
    "SELECT application_name, count(*) FROM pg_stat_activity WHERE application_name LIKE :like "
    "GROUP BY 1"
)


def named(url: str, process: str) -> str:
    """The URL by which the server calls the connections of a process so."""
    parsed = make_url(url)
    name = f"{parsed.query['application_name']}-{process}"
    return parsed.update_query_dict({"application_name": name}).render_as_string(False)


@contextmanager
def most_open(url: str) -> Iterator[Counter[str]]:
    """The most connections that were open at a time, for each process; sampled in the block."""
    found: Counter[str] = Counter()
    ended = threading.Event()
    prefix = f"{make_url(url).query['application_name']}-"

    def sample() -> None:
        with administering(url) as admin:
            while not ended.is_set():
                for name, count in admin.execute(OPEN, {"like": f"{prefix}%"}):
                    process = name.removeprefix(prefix)
                    found[process] = max(found[process], count)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_worker_under_load_holds_two_connections(
    store: Store, database_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    def ask(client: httpx.Client) -> int:
        return client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4}).status_code

    def of(process: str) -> dict[str, str]:
        return BUSY | {"NIGHTJAR_DATABASE_URL": named(database_url, process)}

    with running(database_url) as deployment, most_open(database_url) as found:
        broker = {"NIGHTJAR_BROKER_URL": deployment.environment["NIGHTJAR_BROKER_URL"]}
        deployment.planner(tiny_model, **of("planner"))
        deployment.worker(tiny_model, **of("worker"))
        api_settings = of("api") | broker | {"NIGHTJAR_ACCEPT_ANY_MODEL": "true"}
        api_settings.pop("NIGHTJAR_DATABASE_URL")
        with running_api(named(database_url, "api"), tiny_model, tmp_path, **api_settings) as api:
            job_id = submit_for(store, "default", ROWS)
            with httpx.Client(base_url=api.url, timeout=60) as client, ThreadPoolExecutor(8) as at:
                codes = Counter(at.map(ask, [client] * CALLS))
            wait_until("the job", lambda: store.jobs.get(job_id).completed == ROWS)
    assert codes == {200: CALLS}
    assert found["worker"] == 2
