"""Settings that say where a deployment keeps its work; a part of `Settings`."""

from typing import Annotated

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings

from nightjar.pipeline.settings.read_by import (
    API,
    COMMANDS,
    CONNECTED,
    GPU_WORKER,
    PLANNER,
    TASK_RUNNER,
    UPLOADS,
    read_by,
)

_BROKERS = ("redis", "rediss", "redis+socket", "sentinel")


class PlaceSettings(BaseSettings):
    """Where things are."""

    database_url: Annotated[
        SecretStr, read_by(API, UPLOADS, PLANNER, GPU_WORKER, TASK_RUNNER, COMMANDS)
    ] = Field(
        SecretStr("sqlite:///nightjar.db"),
        description="the database: `sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST/NAME`",
    )
    database_direct_url: Annotated[
        SecretStr | None,
        read_by(API, UPLOADS, PLANNER, TASK_RUNNER, COMMANDS, page="guides/pooler.md"),
    ] = Field(
        None,
        description="PostgreSQL itself, where `NIGHTJAR_DATABASE_URL` is a pooler in transaction "
        "mode: uploads and migrations need a session",
    )
    broker_url: Annotated[SecretStr, read_by(*CONNECTED)] = Field(
        SecretStr("redis://127.0.0.1:6379/0"),
        description="Redis or Valkey: `redis://:PASSWORD@HOST:6379/0`; with Sentinel "
        "`sentinel://:PASSWORD@HOST:26379/0;sentinel://:PASSWORD@HOST:26379/0`",
    )
    broker_master_name: Annotated[str, read_by(*CONNECTED)] = Field(
        "mymaster",
        min_length=1,
        description="the name under which Sentinel knows the broker's servers; only for "
        "`sentinel://`",
    )
    broker_sentinel_password: Annotated[SecretStr | None, read_by(*CONNECTED)] = Field(
        None,
        description="password of the Sentinels themselves, if they ask for one; that of the broker "
        "is in its URL",
    )
    message_key: Annotated[SecretStr | None, read_by(*CONNECTED)] = Field(
        None,
        min_length=16,
        description="secret that signs messages, the same for all processes; unsigned messages are "
        "dropped. Without one, anyone who reaches the broker may send work",
    )

    @field_validator("broker_url")
    @classmethod
    def _names_a_broker(cls, url: SecretStr) -> SecretStr:
        # Kombu takes a URL without a scheme for AMQP and tries to connect for ever.
        scheme, colon, _ = url.get_secret_value().partition("://")
        if not colon or scheme not in _BROKERS:
            raise ValueError(
                "a broker's URL begins with redis:// (or rediss://, redis+socket://, sentinel://); "
                "write redis://:PASSWORD@HOST:6379/0"
            )
        return url
