"""PgBouncer before the tests' PostgreSQL: it lends another session to each transaction.

Debian's package pgbouncer has the program. Without it, tests are skipped on a laptop and fail
where the variable CI is set.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url

from nightjar.pipeline.embedded.processes import Service
from tests.postgres_schemas import administering
from tests.processes import wait_until
from tests.services import free_port

_GRACE_S = 5.0


def pgbouncer() -> str:
    """The path of the program; without one the test is skipped."""
    found = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        reason = "no PgBouncer: apt-get install pgbouncer"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@contextmanager
def pooled(url: str, *, sessions: int) -> Iterator[str]:
    """The URL of a pooler in transaction mode before the schema of a URL.

    All its clients share so many sessions of the server.
    """
    program, port, server = pgbouncer(), free_port(), make_url(url)
    folder = Path(tempfile.mkdtemp(prefix="nightjar-pooler-"))
    try:
        folder.chmod(0o777)  # for its user
        settings = folder / "pgbouncer.ini"
        settings.write_text(_configuration(server, port, sessions), encoding="utf-8")
        identity = [f"--user={_user(server)}"] if os.geteuid() == 0 else []
        service = Service(
            "pgbouncer", [program, *identity, str(settings)], folder / "log", os.environ, folder
        )
        service.start()
        through = URL.create(
            "postgresql+psycopg", server.username, host="127.0.0.1", port=port, database="pooled"
        )
        try:
            wait_until("the pooler", lambda: _answers(through))
            yield through.render_as_string(hide_password=False)
        finally:
            service.stop(_GRACE_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _user(server: URL) -> str:
    """Whom PgBouncer runs as, which is never root: who gets to the server's socket."""
    place = Path(str(server.query.get("host", "")))
    return place.owner() if place.is_absolute() else "nobody"


def _configuration(server: URL, port: int, sessions: int) -> str:
    name = server.query["application_name"]
    place = {
        "host": server.host or server.query.get("host"),
        "port": server.port or server.query.get("port"),
        "dbname": server.database,
        "user": server.username,
        "password": server.password,
        # What `options` says in the URL of the tests: PgBouncer does not take that.
        "connect_query": f"'SET search_path TO {name}; SET application_name TO ''{name}'''",
    }
    words = " ".join(f"{key}={value}" for key, value in place.items() if value)
    lines = ["[databases]", f"pooled = {words}", "[pgbouncer]", "pool_mode = transaction"]
    lines += [
        "listen_addr = 127.0.0.1",
        f"listen_port = {port}",
        "unix_socket_dir =",
        "auth_type = any",
    ]
    lines += [f"default_pool_size = {sessions}", "max_client_conn = 500"]
    return "\n".join(lines) + "\n"


def _answers(url: URL) -> bool:
    with (
        suppress(sa.exc.OperationalError),
        administering(url.render_as_string(hide_password=False)) as admin,
    ):
        return admin.exec_driver_sql("SELECT 1").scalar() == 1
    return False
