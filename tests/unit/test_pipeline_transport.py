"""The mended Redis transport is the one in use, and says that a connection is gone."""

from types import SimpleNamespace

import pytest
from pydantic import SecretStr

from nightjar.pipeline.celery_app import create_celery_app
from nightjar.pipeline.settings import Settings
from nightjar.pipeline.transport import Channel, Transport


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
