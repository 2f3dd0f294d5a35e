"""The mended Redis transport is the one in use, and says that a connection is gone."""

from types import SimpleNamespace

import pytest
from pydantic import SecretStr

from nightjar.pipeline.celery_app import create_celery_app
from nightjar.pipeline.settings import Settings
from nightjar.pipeline.transport import Channel, Transport, _fault

GOOD = {
    "body": "W10=",
    "headers": {"task": "nightjar.compute", "id": "1"},
    "properties": {
        "delivery_tag": "2",
        "delivery_info": {"exchange": "generate-32", "routing_key": "generate-32"},
    },
}


@pytest.mark.parametrize("url", ["redis://:pw@valkey:6379/0", "redis+socket:///tmp/b.sock"])
def test_it_carries_nightjars_messages(url: str) -> None:
    app = create_celery_app(Settings(broker_url=SecretStr(url)))
    assert app.connection_for_write().get_transport_cls() is Transport


@pytest.mark.parametrize("connection", [None, SimpleNamespace(client=None)])
def test_a_closed_connection_is_a_connection_error(connection: object) -> None:
    channel = Channel.__new__(Channel)
    channel.connection = connection
    with pytest.raises(Transport.connection_errors, match="closed"):
        channel._connparams()


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ([], "body is missing"),
        ({}, "body is missing"),
        ("text", "body is missing"),
        (None, "body is missing"),
        (GOOD | {"headers": {"task": ["nightjar.compute"], "id": "1"}}, "headers.task"),
        (GOOD | {"headers": {"task": "nightjar.compute"}}, "headers.id"),
        (GOOD | {"properties": {"delivery_info": {}}}, "properties.delivery_tag"),
        (GOOD | {"properties": "none"}, "properties is missing or no dict"),
    ],
)
def test_what_is_no_message_of_celerys_is_known(message: object, fault: str) -> None:
    assert fault in str(_fault(message))


def test_a_message_of_celerys_passes() -> None:
    assert _fault(GOOD) is None
