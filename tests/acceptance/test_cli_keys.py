"""`nightjar keys` and `nightjar tenants`, on a database of their own."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from nightjar.jobs.accounts import is_key
from nightjar.jobs.models import PlannedModel
from nightjar.jobs.store import Store
from nightjar.pipeline.front.cli import app
from tests.outcomes import compute
from tests.processes import nightjar
from tests.tenants import plan_for


@pytest.fixture(autouse=True)
def database(sqlite_url: str, migrated_sqlite_file: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    shutil.copy(migrated_sqlite_file, sqlite_url.removeprefix("sqlite:///"))
    monkeypatch.setenv("NIGHTJAR_DATABASE_URL", sqlite_url)
    return sqlite_url


def call(*arguments: str) -> Result:
    """The command within this process: a new one takes a second."""
    return CliRunner().invoke(app, [*arguments])


def told(*arguments: str) -> Any:
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_the_key_alone_goes_to_standard_output(database: str) -> None:
    """So that a shell takes it by KEY=$(nightjar keys create)."""
    made = nightjar("keys", "create", "--scope", "read", "--label", "밤", "--expires", "90d")
    assert made.returncode == 0, made.stderr
    assert made.stdout == f"{made.stdout.strip()}\n"
    key = made.stdout.strip()
    assert is_key(key)
    assert f"{key[:11]}: a key of default with the scope read; it is shown only" in made.stderr
    assert key not in made.stderr
    listed = call("keys", "list")
    assert key[:11] in listed.stdout
    assert key not in listed.stdout
    (one,) = told("keys", "list")
    assert (one["prefix"], one["scope"], one["label"]) == (key[:11], "read", "밤")
    assert (one["state"], one["expires_at"][:4] >= "2026") == ("usable", True)


def test_a_key_is_rotated_and_revoked() -> None:
    told("tenants", "create", "owls")
    old = told("keys", "create", "--tenant", "owls")
    assert (old["tenant"], old["scope"]) == ("owls", "submit")
    rotated = call("keys", "rotate", old["key"], "--grace", "2h")  # the whole key will do
    assert is_key(rotated.stdout.strip())
    assert f"{old['prefix']} stays valid for 2h at most" in rotated.stderr
    assert told("keys", "rotate", rotated.stdout[:11], "--grace", "0m")["key"] != old["key"]
    states = [key["state"] for key in told("keys", "list", "--tenant", "owls")]
    assert states == ["usable", "expired", "usable"]
    assert call("keys", "revoke", old["prefix"]).stdout == f"{old['prefix']} is revoked\n"
    assert told("keys", "revoke", old["prefix"])["state"] == "revoked"
    assert told("keys", "list", "--tenant", "default") == []


def test_tenants_are_made_changed_and_listed() -> None:
    made = told("tenants", "create", "owls", "--tokens-a-day", "1000", "--weight", "3")
    limits = {"requests_a_minute": None, "rows_waiting": None, "bytes_stored": None}
    limits |= {"keep_results_s": None}
    assert made == {"name": "owls", "weight": 3.0, "tokens_a_day": 1000} | limits
    assert told("tenants", "set", "owls", "--keep-results", "30d")["keep_results_s"] == 2_592_000
    assert told("tenants", "set", "owls", "--keep-results", "none")["keep_results_s"] is None
    changed = told("tenants", "set", "owls", "--tokens-a-day", "none", "--rows-waiting", "0")
    assert (changed["weight"], changed["tokens_a_day"], changed["rows_waiting"]) == (3.0, None, 0)
    assert told("tenants", "set", "default", "--requests-a-minute", "60")["name"] == "default"
    assert [one["name"] for one in told("tenants", "list")] == ["default", "owls"]
    header, first, second = call("tenants", "list").stdout.splitlines()
    assert header.split()[:3] == ["name", "weight", "requests_a_minute"]
    assert (first.split(), second.split()) == (
        ["default", "1.0", "60", "-", "-", "-", "-"],
        ["owls", "3.0", "-", "-", "0", "-", "-"],
    )


def test_create_and_set_take_the_same_options() -> None:
    limits = ("--requests-a-minute", "--tokens-a-day", "--rows-waiting", "--bytes-stored")
    given = [word for number, option in enumerate(limits) for word in (option, str(number))]
    given += ["--keep-results", "4h"]
    made = told("tenants", "create", "owls", "--weight", "2", *given)
    assert [*made.values()] == ["owls", 2.0, 0, 1, 2, 3, 14_400]
    limits = (*limits, "--keep-results")
    lifted = told("tenants", "set", "owls", *[one for name in limits for one in (name, "none")])
    assert [*lifted.values()] == ["owls", 2.0, None, None, None, None, None]
    for command in ("create", "set"):
        shown = call("tenants", command, "--help").stdout
        assert all(option in shown for option in ("--weight", "--json", *limits))


def test_shares_name_models_and_tenants(database: str) -> None:
    store = Store(database)
    for name, micro_batches, model in (("owls", 3, "a" * 64), ("bats", 1, "b" * 64)):
        told("tenants", "create", name, "--weight", "3")
        for ref in plan_for(store, name, micro_batches, fingerprint=model):
            compute(store, ref)  # 5 tokens a row
    store.shares.settle()
    store.models.plan_for([PlannedModel("org/large", "a" * 64, 64)])
    store.close()
    header, *lines = call("shares").stdout.splitlines()
    assert header.split() == ["model", "tenant", "weight", "computed", "tokens", "of", "all"]
    assert sorted(line.split() for line in lines) == [
        ["b" * 12, "bats", "3", "5", "100.0%"],
        ["org/large", "owls", "3", "15", "100.0%"],
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "keys create --tenant owls",
            "no tenant 'owls'; make it by `nightjar tenants create owls`",
        ),
        ("keys create --scope root", "'root' is not one of"),
        ("keys create --expires 90", "'90' is no span of time: write a number and m, h or d"),
        ("keys create --expires 0d", "would have expired already"),
        ("keys create --expires 999999d", "is no span of time"),
        ("keys list --tenant owls", "no tenant 'owls'"),
        ("keys rotate nj_abcd1234", "there is no key nj_abcd1234; `nightjar keys list`"),
        ("keys rotate nj_abcd1234 --grace soon", "'soon' is no span"),
        ("keys revoke 17", "it begins with nj_ and 8 characters"),
        ("tenants create Owls", "is no name of a tenant"),
        ("tenants create owls --weight 0", "weight 0.0: must be a number from 0.001"),
        ("tenants create owls --tokens-a-day -1", "--tokens-a-day '-1': write a whole number"),
        ("tenants set owls --rows-waiting 5", "no tenant 'owls'"),
        ("tenants set default", "name what to change, such as --tokens-a-day"),
        ("tenants set default --keep-results 7", "'7' is no span of time"),
        ("tenants set default --keep-results 5m", "keep_results_s 300: must be from 3600 (1 hour)"),
        ("tenants set default --bytes-stored 1GB", "--bytes-stored '1GB': write a whole number"),
        ("tenants set default --bytes-stored 9999999999999999999", "must be a whole number from 0"),
    ],
)
def test_what_cannot_be_done_is_told_with_its_mend(arguments: str, said: str) -> None:
    done = call(*arguments.split())
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""


def test_a_database_without_tables_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTJAR_DATABASE_URL", f"sqlite:///{tmp_path / 'empty.db'}")
    done = nightjar("keys", "create")
    assert (done.returncode, done.stdout) == (1, "")
    assert "run `nightjar migrate`" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_api_opens_itself_to_others_only_with_a_key(
    database: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTJAR_MODEL", str(tiny_model))

    def serve(settings: object, host: str, port: int) -> None:
        served.append(host)

    served: list[str] = []
    monkeypatch.setattr("nightjar.pipeline.front.api_server.serve", serve)
    for host in ("0.0.0.0", "::", "192.0.2.1", "night.example.org", ""):  # noqa: S104
        refused = call("api", "--host", host)
        assert refused.exit_code == 2
        assert f"--host {host} opens the API to others, and no key" in refused.stderr
        assert "`nightjar keys create --scope admin`, or set NIGHTJAR_API_KEY" in refused.stderr
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert call("api", "--host", host).exit_code == 0
    assert len(served) == 4
    key = told("keys", "create")
    assert call("api", "--host", "0.0.0.0").exit_code == 0  # noqa: S104
    call("keys", "revoke", key["prefix"])
    assert call("api", "--host", "0.0.0.0").exit_code == 2  # noqa: S104
    monkeypatch.setenv("NIGHTJAR_API_KEY", key["key"])  # made by us, and revoked
    assert call("api", "--host", "0.0.0.0").exit_code == 2  # noqa: S104
    monkeypatch.setenv("NIGHTJAR_API_KEY", "a" * 32)
    assert call("api", "--host", "0.0.0.0").exit_code == 0  # noqa: S104
    monkeypatch.setenv("NIGHTJAR_API_KEY", "a" * 31)
    short = call("api", "--host", "0.0.0.0")  # noqa: S104
    assert (short.exit_code, "NIGHTJAR_API_KEY: must have at least 32" in short.stderr) == (2, True)
    store = Store(database)
    assert store.accounts.has_keys()
    store.close()
