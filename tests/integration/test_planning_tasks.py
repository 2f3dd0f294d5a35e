"""How the planner worker ends: its passes first, then its lead."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nightjar.jobs.store import Store
from nightjar.pipeline.planning import tasks
from nightjar.pipeline.queue.leadership import PLANNER
from nightjar.pipeline.settings import Settings
from tests.processes import wait_until

SWEEP_EVERY_S = 0.05
_PARTS = (
    tasks._store,
    tasks._planner,
    tasks._sweeper,
    tasks._model_change,
    tasks._leadership,
    tasks._passes,
)


@pytest.fixture
def store(
    sqlite_url: str,
    migrated_sqlite_file: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Store]:
    """The store of a planner in this process."""
    shutil.copy(migrated_sqlite_file, sqlite_url.removeprefix("sqlite:///"))
    given = Settings.read(database_url=sqlite_url, model=tiny_model, sweep_every_s=SWEEP_EVERY_S)
    monkeypatch.setattr(tasks, "settings", given)
    for part in _PARTS:
        part.cache_clear()
    yield tasks._store()
    for one in tasks._passes().values():
        one.stop(10)
    tasks._store().close()
    for part in _PARTS:
        part.cache_clear()


def test_no_pass_goes_on_after_the_lead_is_resigned(store: Store) -> None:
    tasks._passes()["sweep"].start()
    wait_until("the lead", lambda: store.leaders.get(PLANNER), 30)
    tasks._close()
    left = store.leaders.get(PLANNER)
    assert left is not None
    assert left.owner is None
    time.sleep(4 * SWEEP_EVERY_S)  # a sweep would take the lead again
    assert store.leaders.get(PLANNER) == left
