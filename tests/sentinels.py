"""A broker of two servers, one of which replaces the other: three Sentinels see to that."""

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import redis

from nightjar.pipeline.embedded.broker import broker_command
from nightjar.pipeline.embedded.processes import Service

MASTER_NAME = "nightjar-broker"
_QUORUM = 2
_DOWN_AFTER_MS = 2_000
_PATIENCE_S = 60.0
_GRACE_S = 10.0


class ReplicatedBroker:
    """A master, its replica and three Sentinels, on ports of this machine.

    Args:
        folder: Where their files and logs go.
        password: Of the servers.
        sentinel_password: Of the Sentinels.
    """

    def __init__(self, folder: Path, password: str, sentinel_password: str) -> None:
        self._password, self._sentinel_password = password, sentinel_password
        self.ports = _free_ports(5)
        self.master, self.replica, *sentinels = self.ports
        program = broker_command(folder)[0]
        servers = {port: folder / str(port) for port in self.ports}
        for port, home in servers.items():
            home.mkdir()
            (home / "server.conf").write_text(self._configuration(port, home), encoding="utf-8")
        self._services = {
            port: Service(
                str(port),
                [
                    program,
                    str(home / "server.conf"),
                    *(["--sentinel"] if port in sentinels else []),
                ],
                home / "log",
                os.environ,
                home,
            )
            for port, home in servers.items()
        }
        login = f"sentinel://:{password}@127.0.0.1"
        self.url = ";".join(f"{login}:{port}/0" for port in sentinels)
        self.environment = {
            "NIGHTJAR_BROKER_URL": self.url,
            "NIGHTJAR_BROKER_MASTER_NAME": MASTER_NAME,
            "NIGHTJAR_BROKER_SENTINEL_PASSWORD": sentinel_password,
        }

    def start(self) -> None:
        """Start all, and wait until the replica follows and the Sentinels know each other."""
        for service in self._services.values():
            service.start()
        self._wait("the replica", lambda: self._info(self.replica)["master_link_status"] == "up")
        self._wait("the Sentinels", self._are_ready)

    def kill_master(self) -> None:
        """SIGKILL to the server that is the master now; it stays down."""
        process = self._services[self.master].process
        assert process is not None
        process.kill()
        process.wait()
        self.master, self.replica = self.replica, self.master

    def was_promoted(self) -> bool:
        """Whether each Sentinel says that the server that is left is the master."""
        found = [self._info(port)["master0"] for port in self.ports[2:]]
        wanted = ("ok", f"127.0.0.1:{self.master}")
        return all((master["status"], master["address"]) == wanted for master in found)

    def close(self) -> None:
        """End every process."""
        for service in reversed(self._services.values()):
            service.stop(_GRACE_S)

    def _configuration(self, port: int, home: Path) -> str:
        lines = [f"port {port}", "bind 127.0.0.1", f"dir {home}", "protected-mode no"]
        if port in (self.master, self.replica):
            lines += ['save ""', "maxmemory-policy noeviction", f"requirepass {self._password}"]
            lines.append(f"masterauth {self._password}")
            if port == self.replica:
                lines.append(f"replicaof 127.0.0.1 {self.master}")
        else:
            lines += [
                f"requirepass {self._sentinel_password}",
                f"sentinel sentinel-pass {self._sentinel_password}",
                f"sentinel monitor {MASTER_NAME} 127.0.0.1 {self.master} {_QUORUM}",
                f"sentinel auth-pass {MASTER_NAME} {self._password}",
                f"sentinel down-after-milliseconds {MASTER_NAME} {_DOWN_AFTER_MS}",
                f"sentinel failover-timeout {MASTER_NAME} 10000",
            ]
        return "\n".join(lines) + "\n"

    def _are_ready(self) -> bool:
        masters = [self._info(port)["master0"] for port in self.ports[2:]]
        return all(found["slaves"] == 1 and found["sentinels"] == 3 for found in masters)

    def _info(self, port: int) -> dict[str, Any]:
        password = self._password if port in self.ports[:2] else self._sentinel_password
        with closing(redis.Redis(port=port, password=password)) as client:
            return dict(client.info())

    def _wait(self, what: str, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                if condition():
                    return
            except (redis.RedisError, KeyError):  # not there yet
                pass
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.1)


@contextmanager
def replicated_broker() -> Iterator[ReplicatedBroker]:
    """A broker of two servers that runs as long as the block."""
    folder = Path(tempfile.mkdtemp(prefix="nightjar-broker-"))
    broker = ReplicatedBroker(folder, "of-the-broker", "of-sentinel")
    try:
        broker.start()
        yield broker
    finally:
        broker.close()
        shutil.rmtree(folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    taken = [socket.socket() for _ in range(count)]
    for one in taken:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in taken]
    for one in taken:
        one.close()
    return ports
