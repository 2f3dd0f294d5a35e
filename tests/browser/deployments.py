"""What the browser looks at: a filled database behind an API, and a deployment that computes."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nightjar.jobs.accounts import NewKey
from nightjar.jobs.states import Scope
from nightjar.jobs.store import Store
from tests.api_process import running_api
from tests.monitored import Monitored, monitored
from tests.shown_deployment import Shown, beat, fill

BEAT_EVERY_S = 3.0  # a worker that is silent for longer than a while is shown as such


@dataclass(frozen=True)
class Site:
    """A running API: where it answers, its store, the jobs in it, and keys that open it."""

    url: str  # of the page
    store: Store
    jobs: Shown
    operator_key: str
    tenant_key: str  # of `search`, whose one job is `jobs.foreign`


@contextmanager
def filled_site(folder: Path) -> Iterator[Site]:
    """A new SQLite file with jobs in every state, and an API over it that asks for a key."""
    database_url = f"sqlite:///{folder / 'shown.db'}"
    store = Store(database_url)
    try:
        store.migrate()
        jobs = fill(store)
        operator, _ = store.accounts.create_key(NewKey("default", Scope.ADMIN))
        tenant, _ = store.accounts.create_key(NewKey("search", Scope.SUBMIT))
        with (
            _beating(store),
            running_api(database_url, folder / "no-model", folder) as api,
        ):
            yield Site(f"{api.url}/ui", store, jobs, operator, tenant)
    finally:
        store.close()


@contextmanager
def _beating(store: Store) -> Iterator[None]:
    """The signs of life of the worker in the database."""
    over = threading.Event()

    def give() -> None:
        while not over.wait(BEAT_EVERY_S):
            beat(store)

    thread = threading.Thread(target=give)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


COMPUTING_KEY = "the-key-of-a-deployment-that-computes"
FLOWER_LOGIN = ("owl", "the-password-of-flower")
STEP_S = "0.15"


@dataclass(frozen=True)
class Deployment:
    """Processes that compute with the fake engine: nothing is paused, and all of it is real."""

    system: Monitored

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.system.ports['api']}/ui"

    @property
    def flower_url(self) -> str:
        """Where Flower is."""
        return f"http://127.0.0.1:{self.system.ports['flower']}"

    def submit(self, rows: int, prompt: str = "hoot") -> str:
        """A job of so many rows over HTTP; returns its id."""
        lines = (
            {
                "custom_id": f"row-{n}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": f"{prompt} {n}", "max_tokens": 12, "seed": n},
            }
            for n in range(rows)
        )
        with self.system.client as client:
            sent = client.post("/v1/jobs", content="\n".join(map(json.dumps, lines)))
            job_id: str = sent.raise_for_status().json()["id"]
        return job_id


@contextmanager
def computing_deployment(model: Path, folder: Path) -> Iterator[Deployment]:
    """Broker, planner, GPU worker with the fake engine, beat, API and Flower over a new SQLite."""
    database_url = f"sqlite:///{folder / 'computing.db'}"
    settings = {
        "NIGHTJAR_FAKE_STEP_S": STEP_S,
        "NIGHTJAR_FLOWER_AUTH": ":".join(FLOWER_LOGIN),
    }
    with monitored(database_url, model, folder, COMPUTING_KEY, **settings) as system:
        yield Deployment(system)
