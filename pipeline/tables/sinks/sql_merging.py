"""From the staging table to the tables that readers see, in one transaction."""

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from nightjar.pipeline.tables.sinks.columns import ERRORS
from nightjar.pipeline.tables.sinks.sql_tables import Target

Condition = sa.ColumnElement[bool]

_SINKS = "nightjar_sinks"


def merge(
    connection: Connection,
    staging: sa.Table,
    target: Target,
    errors: Target | None,
    *,
    mirror: bool,
) -> int:
    """Upsert what is staged by key; return how many rows mirroring has deleted.

    With a table of errors a key is in one of the two tables.
    """
    if connection.dialect.name == "sqlite":  # which has no hash join
        keys = [staging.c[name] for name in target.keys]
        connection.execute(
            sa.schema.CreateIndex(sa.Index(f"{staging.name}_keys", *keys), if_not_exists=True)
        )
    else:
        connection.exec_driver_sql(f"ANALYZE {_quoted(connection, staging)}")
    failed: Condition = staging.c[ERRORS[0]].is_not(None)
    if errors is None:
        _upsert(connection, staging, target, None)
        return _delete_others(connection, staging, target, None) if mirror else 0
    _upsert(connection, staging, target, ~failed)
    _upsert(connection, staging, errors, failed)
    _delete_named(connection, staging, target, failed)
    _delete_named(connection, staging, errors, ~failed)
    if not mirror:
        return 0
    return _delete_others(connection, staging, target, ~failed) + _delete_others(
        connection, staging, errors, failed
    )


def note(connection: Connection, targets: Sequence[Target], run: str) -> None:
    """Write down that Nightjar has written these tables."""
    for target in targets:
        sinks = _sinks(target)
        sinks.create(connection, checkfirst=True)
        connection.execute(sa.delete(sinks).where(sinks.c.table_name == target.name))
        connection.execute(sa.insert(sinks), {"table_name": target.name, "run": run})


def is_ours(connection: Connection, target: Target) -> bool:
    """Whether Nightjar has written the table, or it has no rows."""
    if not target.exists:
        return True
    table, sinks = target.table, _sinks(target)
    if connection.execute(sa.select(sa.literal(1)).select_from(table).limit(1)).first() is None:
        return True
    if not sa.inspect(connection).has_table(sinks.name, sinks.schema):
        return False
    noted = sa.select(sinks.c.run).where(sinks.c.table_name == target.name)
    return connection.execute(noted).first() is not None


def _sinks(target: Target) -> sa.Table:
    """Which tables of a schema Nightjar has written: only those lose rows by mirroring."""
    return sa.Table(
        _SINKS,
        sa.MetaData(),
        sa.Column("table_name", sa.Text, primary_key=True),
        sa.Column("run", sa.Text, nullable=False),
        schema=target.table.schema,
    )


def _upsert(
    connection: Connection, staging: sa.Table, target: Target, where: Condition | None
) -> None:
    table = target.table
    names = [column.name for column in table.columns]
    # Without a WHERE, SQLite takes ON CONFLICT for a join.
    wanted = sa.text("1 = 1") if where is None else where
    selected = sa.select(*(staging.c[name] for name in names)).where(wanted)
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    statement = insert(table).from_select(names, selected)
    new = statement.excluded
    # Rows that stay as they are cost a table its room, and its readers their cache.
    changed = sa.or_(*(table.c[name].is_distinct_from(new[name]) for name in target.answers))
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=list(target.keys),
            set_={name: new[name] for name in target.answers},
            where=changed,
        )
    )


def _same_key(staging: sa.Table, target: Target) -> Condition:
    return sa.and_(*(staging.c[name] == target.table.c[name] for name in target.keys))


def _delete_named(
    connection: Connection, staging: sa.Table, target: Target, where: Condition
) -> None:
    """Delete the rows whose keys are staged and meet the condition."""
    staged = sa.select(sa.literal(1)).select_from(staging).where(_same_key(staging, target), where)
    connection.execute(sa.delete(target.table).where(staged.correlate(target.table).exists()))


def _delete_others(
    connection: Connection, staging: sa.Table, target: Target, where: Condition | None
) -> int:
    """Delete the rows whose keys are not staged; return how many."""
    staged = sa.select(sa.literal(1)).select_from(staging).where(_same_key(staging, target))
    if where is not None:
        staged = staged.where(where)
    found = connection.execute(
        sa.delete(target.table).where(~staged.correlate(target.table).exists())
    )
    return found.rowcount


def _quoted(connection: Connection, table: sa.Table) -> str:
    return connection.dialect.identifier_preparer.format_table(table)
