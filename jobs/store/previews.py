"""What a few landed rows were asked for: the beginnings of result files for people."""

from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from nightjar.jobs.records import JsonObject
from nightjar.jobs.store.bodies import load_body
from nightjar.jobs.store.body_rows import Bodies, Row
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.parts import in_parts_of
from nightjar.jobs.store.tables import request

LONGEST_BODY_BYTES = 64 * 1024


class Previews:
    """Reads the bodies of single requests."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._bodies = Bodies(database)

    def asked(self, request_ids: Sequence[int]) -> Mapping[int, JsonObject]:
        """The bodies of these requests by id, without those that are longer than 64 KiB."""
        row = request.c
        statement = (
            sa.select(row.job_id, row.id, row.row_index)
            .where(row.id.in_(request_ids), in_parts_of(row.id, request_ids))
            .order_by(row.job_id, row.row_index)
        )
        asked: dict[int, JsonObject] = {}
        with self._database.reading() as connection:
            rows = connection.execute(statement).all()
            for job_id in {row.job_id for row in rows}:
                own = [Row(row.id, row.row_index) for row in rows if row.job_id == job_id]
                bodies = self._bodies.read(connection, job_id, own, longest=LONGEST_BODY_BYTES)
                asked |= {id_: load_body(body) for id_, body in bodies.items()}
        return asked
