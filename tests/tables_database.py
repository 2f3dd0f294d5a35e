"""A user's database that results are written to."""

from typing import Any

import sqlalchemy as sa

from nightjar.pipeline.tables.databases import database_url, open_database
from nightjar.pipeline.tables.sinks.sink import Sink
from tests.tables import sink


class Db:
    """The user's database."""

    def __init__(self, url: str) -> None:
        self.environment = {"SINK_URL": url}
        self.engine = open_database(database_url("env:SINK_URL", self.environment))
        self.is_sqlite = url.startswith("sqlite")

    def sink(self, kind: Any = "generate", *, run: str = "run-1", **options: Any) -> Sink:
        apart = ("keys", "n", "errors", "overwrite")
        outer = {name: options.pop(name) for name in apart if name in options}
        sql = {"url": "env:SINK_URL", "table": "answers", **options}
        return sink(kind, run=run, environment=self.environment, sql=sql, **outer)

    def rows(self, what: str) -> list[Any]:
        with self.engine.begin() as connection:
            return [tuple(row) for row in connection.exec_driver_sql(what)]

    def run(self, *statements: str) -> None:
        with self.engine.begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    def tables(self) -> set[str]:
        with self.engine.begin() as connection:
            return set(sa.inspect(connection).get_table_names())


def make_answers(db: Db, extra: str = "", key: str = "TEXT PRIMARY KEY") -> None:
    db.run(
        f'CREATE TABLE answers ("user" {key}, text TEXT, finish_reason TEXT, prompt_tokens INTEGER,'
        f" completion_tokens INTEGER, model TEXT, error_code TEXT, error_message TEXT,"
        f" error_param TEXT{extra})"
    )
