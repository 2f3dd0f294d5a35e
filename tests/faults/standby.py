"""A PostgreSQL server and a standby that holds all that it has committed, and replaces it."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import sqlalchemy as sa

from tests.faults.postgres import PrivatePostgres, private_postgres
from tests.postgres_schemas import administering, new_name, url_of


class Standby:
    """A copy of a running server, which follows it until it is promoted.

    Args:
        primary: The server; commits on it wait for this one from now on.
        folder: An empty one, where the servers' user gets to.
    """

    def __init__(self, primary: PrivatePostgres, folder: Path) -> None:
        self._folder = folder
        self._primary = primary
        data = str(folder / "data")
        source = ("-h", str(sa.make_url(primary.url).query["host"]), "-U", "postgres")
        primary.execute("pg_basebackup", *source, "-D", data, "-R", "-X", "stream")
        options = f"-h '' -k {folder}"
        log = ("-l", str(folder / "log"))
        primary.execute("pg_ctl", "-w", "-D", data, *log, "-o", options, "start")
        with administering(primary.url) as admin:
            admin.exec_driver_sql("ALTER SYSTEM SET synchronous_standby_names = '*'")
            admin.exec_driver_sql("SELECT pg_reload_conf()")

    def fresh_database(self) -> str:
        """The URL of an empty schema, on whichever of the two takes writes."""
        name = new_name()
        with administering(self._primary.url) as admin:
            admin.exec_driver_sql(f'CREATE SCHEMA "{name}"')
        url = sa.make_url(url_of(self._primary.url, name))
        hosts = (str(url.query["host"]), str(self._folder))
        both = {**url.query, "host": hosts, "target_session_attrs": "read-write"}
        return url.set(query=both).render_as_string(hide_password=False)

    def promote(self) -> None:
        """Make it take writes."""
        self._primary.execute("pg_ctl", "-w", "-D", str(self._folder / "data"), "promote")

    def stop(self) -> None:
        """End it."""
        with suppress(Exception):
            self._primary.execute(
                "pg_ctl", "-D", str(self._folder / "data"), "-m", "immediate", "stop"
            )


@contextmanager
def primary_and_standby() -> Iterator[tuple[PrivatePostgres, Standby]]:
    """Both run as long as the block, unless it kills one."""
    with private_postgres() as primary:
        folder = Path(tempfile.mkdtemp(prefix="nightjar-standby-"))
        primary.give(folder)
        standby = Standby(primary, folder)
        try:
            yield primary, standby
        finally:
            standby.stop()
            shutil.rmtree(folder, ignore_errors=True)
