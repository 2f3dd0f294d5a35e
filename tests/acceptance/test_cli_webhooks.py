"""`nightjar webhooks`, from a webhook to a delivery that is sent again, on its own database."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook as Standard
from typer.testing import CliRunner, Result

from nightjar.jobs.accounts import Tenant
from nightjar.jobs.store import Store
from nightjar.jobs.webhooks.addresses import AddressGuard
from nightjar.jobs.webhooks.sender import WebhookSender
from nightjar.pipeline.front.cli import app
from nightjar.pipeline.queue.delivering import Delivering
from tests.jobs import planned
from tests.outcomes import compute
from tests.processes import wait_until
from tests.receivers import Receiver, receiving


@pytest.fixture
def store(
    sqlite_url: str, migrated_sqlite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    shutil.copy(migrated_sqlite_file, sqlite_url.removeprefix("sqlite:///"))
    monkeypatch.setenv("NIGHTJAR_DATABASE_URL", sqlite_url)
    opened = Store(sqlite_url)
    yield opened
    opened.close()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("NIGHTJAR_WEBHOOK_ALLOW_PRIVATE", "true")
    with receiving() as opened:
        yield opened


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["webhooks", *arguments])


def told(*arguments: str) -> Any:
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def deliver(store: Store, receiver: Receiver, count: int) -> None:
    """Send what is due until so many events have arrived and are recorded."""
    sender = WebhookSender(AddressGuard(allow_private=True))
    pass_ = Delivering(store.deliveries, sender.send, keep_days=30, idle_s=1)
    pass_.step()
    (webhook,) = store.webhooks.newest("default", 9)
    wait_until("the events", lambda: len(receiver.received) == count, 20)
    (one,) = store.deliveries.newest(webhook.id, 9)
    wait_until("the record", lambda: told("deliveries", webhook.id)[0]["state"] == "delivered", 20)
    pass_.close()
    assert one.webhook_id == webhook.id


def test_from_a_webhook_to_an_event_that_is_sent_again(store: Store, receiver: Receiver) -> None:
    made = call("create", receiver.url, "--event", "job.completed", "--event", "job.failed")
    assert (made.exit_code, made.stdout.count("\n")) == (0, 1)
    secret = made.stdout.strip()
    assert secret.startswith("whsec_")
    assert secret not in made.stderr
    (listed,) = told("list")
    assert f"{listed['id']}: events of default are sent there" in made.stderr
    assert (listed["url"], listed["events"]) == (receiver.url, ["job.completed", "job.failed"])
    assert secret not in json.dumps(listed)
    job_id, (ref,) = planned(store, 1)
    compute(store, ref)
    deliver(store, receiver, 1)
    (sent,) = told("deliveries", listed["id"])
    assert (sent["type"], sent["job_id"], sent["state"]) == ("job.completed", job_id, "delivered")
    assert (sent["attempts"], sent["last_status"]) == (1, 200)
    header, line = call("deliveries", listed["id"]).stdout.splitlines()
    assert header.split()[:4] == ["id", "type", "job_id", "state"]
    assert line.split() == [sent["id"], "job.completed", job_id, "delivered", "1", "200", "-"]
    assert call("redeliver", sent["id"]).stdout == f"{sent['id']} is sent again\n"
    deliver(store, receiver, 2)
    first, again = receiver.received
    assert first.headers["webhook-id"] == again.headers["webhook-id"] == sent["event_id"]
    assert Standard(secret).verify(again.body, again.headers)["type"] == "job.completed"
    assert call("disable", listed["id"]).stdout == f"{listed['id']} is switched off\n"
    off = call("redeliver", sent["id"])
    assert (off.exit_code, "switch it on first" in off.stderr) == (2, True)
    assert told("enable", listed["id"])["enabled"] is True
    assert call("delete", listed["id"]).stdout == f"{listed['id']} is deleted\n"
    assert told("list") == []


def test_a_webhook_belongs_to_its_tenant(store: Store, receiver: Receiver) -> None:
    store.accounts.create_tenant(Tenant("owls"))
    made = told("create", receiver.url, "--tenant", "owls")
    assert made.keys() > {"id", "secret", "events"}
    assert told("list") == []
    assert [one["id"] for one in told("list", "--tenant", "owls")] == [made["id"]]
    for command in ("enable", "disable", "delete", "deliveries"):
        refused = call(command, made["id"])
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert f"there is no webhook '{made['id']}'" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("create http://example.org/", "the URL begins with https://"),
        ("create https://127.0.0.1/", "NIGHTJAR_WEBHOOK_ALLOW_PRIVATE=true allows private ones"),
        ("create https://example.org/ --event job.done", "'job.done' is not one of"),
        ("create https://example.org/ --tenant owls", "no tenant 'owls'"),
        ("list --tenant owls", "no tenant 'owls'"),
        ("delete wh_1", "there is no webhook 'wh_1'"),
        ("redeliver whd_1", "there is no delivery 'whd_1'"),
    ],
)
@pytest.mark.usefixtures("store")
def test_what_cannot_be_done_is_told(arguments: str, said: str) -> None:
    done = call(*arguments.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in " ".join(done.stderr.replace("│", " ").split())


def test_help_shows_examples() -> None:
    for command in ("create", "list", "enable", "disable", "delete", "deliveries", "redeliver"):
        shown = " ".join(call(command, "--help").stdout.split())
        assert f"nightjar webhooks {command}" in shown.partition("Example:")[2]
