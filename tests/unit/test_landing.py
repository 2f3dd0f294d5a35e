"""Writing results while the database is away."""

import time
from itertools import pairwise

import pytest

from nightjar.gpu_worker.worker import landing
from nightjar.gpu_worker.worker.landing import Landing
from nightjar.jobs.errors import StoreUnavailableError
from nightjar.jobs.records import ClaimedMicroBatch
from nightjar.jobs.states import RequestKind

PAUSE_S = 0.05
BATCH = ClaimedMicroBatch(
    1,
    0,
    "job_1",
    RequestKind.GENERATE,
    32,
    size=0,
    tokens=0,
    isolated=False,
    fingerprint="",
    live=False,
    attempts=1,
    crashes=0,
    requests=[],
)


def test_a_database_that_is_away_is_asked_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(landing, "_STORE_RETRY_S", PAUSE_S)
    asked: list[float] = []

    def write() -> bool:
        asked.append(time.monotonic())
        if len(asked) < 3:
            raise StoreUnavailableError("away")
        return True

    assert Landing(9).until_the_database_answers(BATCH, write)
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert len(pauses) == 2
    assert min(pauses) > PAUSE_S / 2


def test_who_has_given_up_asks_once() -> None:
    asked: list[None] = []

    def write() -> bool:
        asked.append(None)
        raise StoreUnavailableError("away")

    ending = Landing(9)
    ending.give_up()
    with pytest.raises(StoreUnavailableError):
        ending.until_the_database_answers(BATCH, write)
    assert len(asked) == 1
