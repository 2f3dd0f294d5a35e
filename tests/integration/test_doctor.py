"""`nightjar doctor` finds what is wrong, works where half is missing, and changes nothing."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from nightjar.jobs.store import Store
from nightjar.jobs.store.diagnosis import found_revision, head_revision, moment_of
from nightjar.pipeline.embedded.broker import broker_command, broker_url, wait_for_broker
from nightjar.pipeline.embedded.processes import Service, private_directory
from nightjar.pipeline.front.cli import app
from nightjar.pipeline.front.doctor import examining
from nightjar.pipeline.front.doctor.fights import check_settings
from nightjar.pipeline.front.doctor.findings import Finding, Level, warning
from nightjar.pipeline.front.doctor.machine import check_compute, check_disk, check_models
from nightjar.pipeline.front.doctor.services import check_broker, check_database
from nightjar.pipeline.settings import Settings
from tests.models import save_gpt2


def levels(found: list[Finding]) -> set[Level]:
    return {one.level for one in found}


@pytest.mark.parametrize(
    ("given", "level", "said"),
    [
        ({"heartbeat_s": 9}, Level.FAULT, "every lease is taken back"),
        ({"heartbeat_s": 3}, Level.WARNING, "fewer than 3 heartbeats"),
        ({"sweep_every_s": 8}, Level.WARNING, "a dead worker is found that late"),
        ({"redispatch_after_s": 0.5}, Level.WARNING, "sent again and again"),
        ({"shards": 2, "compute_stalled_after_s": 5}, Level.WARNING, "the late shard"),
        ({"live_keep_s": 10}, Level.FAULT, "gone before it is read"),
        ({"keep_results_days": 0.5}, Level.WARNING, "window of 24 hours"),
        ({"keep_results_days": 90}, Level.WARNING, "files are deleted before"),
        ({"result_cache_url": "sqlite:///c.db"}, Level.WARNING, "nothing uses it"),
        ({"broker_url": "redis://:p@broker:6379/0"}, Level.FAULT, "not signed"),
        ({"broker_url": "redis://broker/0"}, Level.WARNING, "no password"),
        ({"broker_url": "redis://broker/0"}, Level.WARNING, "the database is a file"),
        ({"trusted_hosts": "*"}, Level.WARNING, "any site"),
        ({"webhook_allow_private": True}, Level.WARNING, "into your network"),
        ({"micro_batch_tokens": 1 << 21}, Level.WARNING, "no micro-batch fills"),
        ({"engine": "fake"}, Level.WARNING, "made up"),
        ({"compute_threads": 4096}, Level.WARNING, "threads wait"),
    ],
)
def test_settings_that_fight_are_found(given: dict[str, object], level: Level, said: str) -> None:
    found = [one for one in check_settings(Settings.read(**given)) if said in one.message]
    assert [one.level for one in found] == [level]
    assert found[0].mend


def test_the_settings_of_a_deployment_do_not_fight() -> None:
    given = {"broker_url": "redis://:p@broker/0", "message_key": "k" * 32}
    found = list(check_settings(Settings.read(database_url="postgresql://db/n", **given)))
    assert levels(found) == {Level.OK}


@pytest.mark.every_database
def test_the_tables_of_the_database(database_url: str) -> None:
    settings = Settings.read(database_url=database_url)
    before = list(check_database(settings))
    assert before[0].level is Level.FAULT
    assert "nightjar migrate" in before[0].mend
    with closing(Store(database_url)) as store:
        store.migrate()
        assert found_revision(store.database) == head_revision()
        assert (moment_of(store.database) is None) == store.database.is_sqlite
    assert levels(list(check_database(settings))) == {Level.OK}


def test_a_missing_database_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    found = list(check_database(Settings.read(database_url=f"sqlite:///{path}")))
    assert levels(found) == {Level.FAULT}
    assert not path.exists()


def test_a_broker_that_is_away_and_its_password() -> None:
    found = list(check_broker(Settings.read(broker_url="redis://:secret@127.0.0.1:1/0")))
    assert levels(found) == {Level.FAULT}
    assert "secret" not in found[0].message + found[0].mend


def test_the_policy_of_a_broker() -> None:
    directory = private_directory()
    service = Service("broker", broker_command(directory), directory / "log", {}, directory)
    try:
        service.start()
        wait_for_broker(directory, service)
        settings = Settings.read(broker_url=broker_url(directory))
        assert Level.FAULT not in levels(list(check_broker(settings)))
        url = broker_url(directory).replace("redis+socket", "unix")
        with closing(redis.Redis.from_url(url)) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        told = [one for one in check_broker(settings) if one.level is Level.FAULT]
    finally:
        service.stop(5)
    assert ["allkeys-lru" in one.message for one in told] == [True]


def test_models_that_can_and_cannot_be_served(tmp_path: Path) -> None:
    good = save_gpt2(tmp_path / "good")
    bad = tmp_path / "bad\x1b[31m"
    bad.mkdir()
    found = list(check_models(Settings.read(models=f"good={good},bad={bad}")))
    assert [one.level for one in found] == [Level.OK, Level.FAULT]
    assert "\x1b" not in found[1].message
    assert levels(list(check_models(Settings.read(model=None, models="")))) == {Level.WARNING}


def test_a_gpu_that_is_not_there() -> None:
    found = list(check_compute(Settings.read(device="cuda")))
    assert [(one.check, one.level) for one in found] == [("gpu", Level.FAULT)]


def test_a_disk_has_room(tmp_path: Path) -> None:
    found = list(check_disk(Settings.read(database_url=f"sqlite:///{tmp_path}/n.db")))
    assert any(str(tmp_path) in one.message for one in found)


def test_the_command_names_every_mend_and_a_check_that_breaks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(_: Settings) -> list[Finding]:
        raise RuntimeError("\x1b[31mno")

    monkeypatch.setenv("NIGHTJAR_DATABASE_URL", f"sqlite:///{tmp_path}/none.db")
    checks = {"disk": broken, "database": check_database}
    monkeypatch.setattr(examining, "CHECKS", checks)
    done = CliRunner().invoke(app, ["doctor", "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["ok"]) == (1, False)
    assert [one["check"] for one in told["findings"]] == ["disk", "database"]
    assert all(one["mend"] for one in told["findings"])
    shown = CliRunner().invoke(app, ["doctor"])
    assert "mend: run `nightjar migrate`" in shown.stdout
    assert "\x1b" not in shown.stdout
    monkeypatch.setattr(examining, "CHECKS", {"disk": lambda _: [warning("disk", "low", "more")]})
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
    assert CliRunner().invoke(app, ["doctor", "--strict"]).exit_code == 1
    monkeypatch.setenv("NIGHTJAR_HEARTBEAT_S", "never")
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 2


@pytest.mark.slow
def test_every_part_is_looked_at(sqlite_tables: str, tmp_path: Path) -> None:
    """The whole list, on this machine: the broker is real, the model is tiny."""
    directory = private_directory()
    service = Service("broker", broker_command(directory), tmp_path / "log", {}, directory)
    service.start()
    try:
        wait_for_broker(directory, service)
        model = save_gpt2(tmp_path / "model")
        given = {"broker_url": broker_url(directory), "model": model, "device": "cpu"}
        found = examining.examine(Settings.read(database_url=sqlite_tables, **given))
    finally:
        service.stop(10)
        shutil.rmtree(directory, ignore_errors=True)
    looked_at = {one.check for one in found}
    parts = {"settings", "database", "broker", "model", "processor", "kernels", "disk", "ports"}
    assert parts | {"clock"} <= looked_at
    told = " ".join(one.message for one in found)
    assert "its tables are at revision" in told
    assert "its memory policy is noeviction" in told
    assert all(one.mend for one in found if one.level is not Level.OK)
