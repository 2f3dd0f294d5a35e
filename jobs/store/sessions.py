"""Sessions of browsers: made at sign-in, found with each request, ended at sign-out."""

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.overview_records import StoredSession
from nightjar.jobs.store.common import now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.session_tables import page_session

SWEPT_AT_ONCE = 1_000
_row = page_session.c
_FIND = sa.select(_row.key_sha256, _row.key_prefix, _row.expires_at).where(
    _row.token_sha256 == sa.bindparam("token")
)


class Sessions:
    """Which cookie stands for which key."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, token_sha256: str, session: StoredSession) -> None:
        """Store a session, and delete some of those that have expired."""
        expired = sa.select(_row.token_sha256).where(_row.expires_at < now()).limit(SWEPT_AT_ONCE)
        values = {
            "token_sha256": token_sha256,
            "key_sha256": session.key_sha256,
            "key_prefix": session.key_prefix,
            "expires_at": session.expires_at,
        }

        def work(connection: Connection) -> None:
            connection.execute(sa.delete(page_session).where(_row.token_sha256.in_(expired)))
            connection.execute(sa.insert(page_session).values(values))

        self._database.write(work)

    def find(self, token_sha256: str) -> StoredSession | None:
        """The session of a cookie; None for one that is unknown or has expired."""
        with self._database.reading() as connection:
            row = connection.execute(_FIND, {"token": token_sha256}).one_or_none()
        return None if row is None or row.expires_at <= now() else StoredSession(*row)

    def end(self, token_sha256: str) -> None:
        """Forget a session."""
        statement = sa.delete(page_session).where(_row.token_sha256 == token_sha256)
        self._database.write(lambda connection: connection.execute(statement))
