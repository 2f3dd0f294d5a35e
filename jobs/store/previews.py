"""What a few landed rows were asked for: the beginnings of result files for people."""

from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from nightjar.jobs.records import JsonObject
from nightjar.jobs.store.bodies import load_body
from nightjar.jobs.store.body_rows import BODY, bodies_among
from nightjar.jobs.store.common import octets
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.parts import in_parts_of
from nightjar.jobs.store.tables import request

LONGEST_BODY_BYTES = 64 * 1024


class Previews:
    """Reads the bodies of single requests."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def asked(self, request_ids: Sequence[int]) -> Mapping[int, JsonObject]:
        """The bodies of these requests by id, without those that are longer than 64 KiB."""
        row = request.c
        size = octets(BODY, is_sqlite=self._database.is_sqlite)
        statement = (
            sa.select(row.id, BODY)
            .join(*bodies_among(request_ids), isouter=True)
            .where(
                row.id.in_(request_ids),
                in_parts_of(row.id, request_ids),
                BODY.is_not(None),
                size <= LONGEST_BODY_BYTES,
            )
        )
        with self._database.reading() as connection:
            return {id_: load_body(body) for id_, body in connection.execute(statement)}
