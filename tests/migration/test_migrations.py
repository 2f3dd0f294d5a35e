"""The revisions make the tables that jobs/store/tables.py describes, on both databases."""

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import op
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from nightjar.jobs.store import Store
from nightjar.jobs.store.all_tables import metadata
from nightjar.jobs.store.bodies import load_body
from nightjar.jobs.store.database import database_url as usable_url
from nightjar.jobs.store.database import open_engine
from nightjar.jobs.store.schema import alembic_config, migrate, revert
from nightjar.jobs.workers import ComputeSeconds
from nightjar.migrations.parts import is_compared, is_partition
from tests.databases import fresh_postgres_database
from tests.jobs import planned
from tests.outcomes import answers, claim
from tests.processes import wait_until


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    opened = open_engine(usable_url(database_url), pool=sa.NullPool)
    yield opened
    opened.dispose()


def tables(engine: sa.Engine) -> set[str]:
    found = sa.inspect(engine).get_table_names()
    return {name for name in found if not is_partition(name)} - {"alembic_version"}


def test_upgrading_from_nothing_makes_every_table(engine: sa.Engine) -> None:
    assert tables(engine) == set()
    migrate(engine.url)
    assert tables(engine) == set(metadata.tables)


def differences(engine: sa.Engine) -> list[object]:
    """How the tables differ from those that the store describes."""
    options = {
        "compare_type": True,
        "compare_server_default": True,
        "include_object": partial(is_compared, engine.dialect.name),
    }
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=options)
        return compare_metadata(context, metadata)


def test_the_revisions_equal_the_tables(engine: sa.Engine) -> None:
    migrate(engine.url)
    assert differences(engine) == []


DESCRIPTION = sa.text("""
SELECT table_name, column_name, data_type, is_nullable, replace(column_default, :own, '')
FROM information_schema.columns WHERE table_schema = current_schema()
UNION ALL
SELECT tablename, indexname, replace(indexdef, :own, ''), '', ''
FROM pg_indexes WHERE schemaname = current_schema()
UNION ALL
SELECT relname, relkind::text, reloptions::text, '', ''
FROM pg_class WHERE relnamespace = current_schema()::regnamespace
ORDER BY 1, 2, 3
""")


def described(url: str) -> list[sa.Row]:
    """Columns, indexes and options of a PostgreSQL database, and its revision."""
    engine = open_engine(usable_url(url), pool=sa.NullPool)
    with engine.connect() as connection:
        own = connection.scalar(sa.text("SELECT current_schema() || '.'"))
        revision = connection.execute(sa.text("SELECT version_num FROM alembic_version")).all()
        found = connection.execute(DESCRIPTION, {"own": own}).all()
    engine.dispose()
    return [*revision, *found]


def test_the_tables_of_tests_are_those_of_a_migration(
    postgres_server: str, postgres_tables: str
) -> None:
    """Tests do what a migration did (tests/databases.py), without running it."""
    with fresh_postgres_database(postgres_server) as url:
        migrate(usable_url(url))
        wanted = described(url)
    assert {row[0] for row in wanted} > set(metadata.tables)
    assert described(postgres_tables) == wanted


def test_partial_indexes_are_made_as_described(engine: sa.Engine) -> None:
    """Autogenerate does not compare the conditions of indexes."""
    migrate(engine.url)
    option = f"{engine.dialect.name}_where"
    # On PostgreSQL each partition has its own unique indexes.
    unique_in = ["request_p0"] if engine.dialect.name == "postgresql" else []
    made = {
        index["name"].removesuffix("_p0"): index["dialect_options"][option]
        for name in [*metadata.tables, *unique_in]
        for index in sa.inspect(engine).get_indexes(name)
        if option in index.get("dialect_options", {})
    }
    described = {
        index.name
        for table in metadata.tables.values()
        for index in table.indexes
        if index.dialect_options[engine.dialect.name]["where"] is not None
    }
    assert len(described) >= 10
    assert set(made) == described
    assert "kind IS NOT NULL" in str(made["uq_request_job_id_custom_id"])
    assert "leader_id IS NOT NULL" in str(made["ix_request_following"])
    assert "error_code IS NOT NULL" in str(made["ix_result_failures"])
    assert "ready" in str(made["ix_micro_batch_ready"])
    assert "isolated" in str(made["ix_micro_batch_suspects"])
    assert "uncharged IS NOT NULL" in str(made["ix_micro_batch_uncharged"])
    assert "owner IS NOT NULL" in str(made["ix_micro_batch_owner"])
    assert "ready" in str(made["ix_micro_batch_live"])
    assert "live" in str(made["ix_micro_batch_live"])
    assert "live" in str(made["ix_job_live"])
    assert "NOT live" in str(made["ix_job_listed"])
    assert "purged_at IS NULL" in str(made["ix_job_kept"])
    assert "keep_results_s IS NOT NULL" in str(made["ix_job_kept_by_itself"])
    assert "purging" in str(made["ix_job_purging"])
    assert "next_at IS NOT NULL" in str(made["ix_webhook_delivery_waiting"])


STORAGE = sa.text("""
SELECT c.relname, c.reloptions || array(SELECT 'toast.' || unnest(t.reloptions))
FROM pg_class c LEFT JOIN pg_class t ON t.oid = c.reltoastrelid
WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'r'
  AND c.reloptions IS NOT NULL
""")


def test_tables_are_stored_as_described(postgres_tables: str) -> None:
    """Autogenerate does not compare how tables are stored."""
    engine = open_engine(usable_url(postgres_tables), pool=sa.NullPool)
    with engine.connect() as connection:
        found = {
            re.sub(r"_p\d+$", "", name): sorted(options)  # a partition is stored as its table says
            for name, options in connection.execute(STORAGE)
        }
    described = {
        name: sorted(
            f"{key}={value}" for key, value in table.dialect_options["postgresql"]["with"].items()
        )
        for name, table in metadata.tables.items()
        if table.dialect_options["postgresql"]["with"]
    }
    assert len(described) >= 9
    assert found == described


def test_no_index_of_requests_names_their_state(engine: sa.Engine) -> None:
    """So that PostgreSQL ends a request without a write to any of them."""
    migrate(engine.url)
    for index in sa.inspect(engine).get_indexes("request"):
        condition = index.get("dialect_options", {}).get(f"{engine.dialect.name}_where", "")
        assert "state" not in [*index["column_names"]]
        assert "state" not in str(condition)


def test_downgrading_takes_everything_away(engine: sa.Engine) -> None:
    migrate(engine.url)
    revert(engine.url)
    assert tables(engine) == set()
    migrate(engine.url)
    assert tables(engine) == set(metadata.tables)


def test_a_worker_of_the_version_before_goes_on_beating(engine: sa.Engine) -> None:
    """Its row is kept, and its beats, which do not know the new columns, still land."""
    moment = "2026-11-21 00:00:00+00:00"
    beat = sa.text(
        "INSERT INTO worker (owner, counter, seen_at) VALUES (:owner, 1, :moment) "
        "ON CONFLICT (owner) DO UPDATE SET counter = worker.counter + 1"
    )
    migrate(engine.url, "0001")
    with engine.begin() as connection:
        connection.execute(beat, {"owner": "old", "moment": moment})
    migrate(engine.url)
    with engine.begin() as connection:
        connection.execute(beat, {"owner": "old", "moment": moment})
        connection.execute(beat, {"owner": "late", "moment": moment})
        rows = connection.execute(
            sa.text("SELECT owner, counter, engine_s, load_s FROM worker ORDER BY owner")
        ).all()
    assert rows == [("late", 1, 0.0, 0.0), ("old", 2, 0.0, 0.0)]


def test_taking_the_seconds_back_keeps_the_workers(engine: sa.Engine) -> None:
    url = engine.url.render_as_string(hide_password=False)
    opened = Store(url)
    opened.migrate()
    opened.heartbeats.beat("worker", ComputeSeconds(engine_s=3.0, load_s=1.0))
    opened.close()
    revert(engine.url, "0001")
    assert {c["name"] for c in sa.inspect(engine).get_columns("worker")} == {
        "owner",
        "counter",
        "seen_at",
    }
    with engine.connect() as connection:
        kept = connection.execute(sa.text("SELECT owner, counter FROM worker")).all()
    assert kept == [("worker", 1)]


JOB = sa.text(
    "INSERT INTO job (id, state, model, metadata, cancel_requested, total, completed, failed, "
    "cancelled, prompt_tokens, completion_tokens, requested_tokens, saved_tokens, created_at) "
    "VALUES (:id, 'queued', 'm', '{}', false, 1, 0, 0, 0, 0, 0, 0, 0, '2026-11-21 00:00:00+00:00')"
)
MICRO_BATCH = sa.text(
    "INSERT INTO micro_batch (job_id, kind, bucket, size, tokens, state, epoch, attempts, crashes) "
    "VALUES (:id, 'generate', 32, 1, 3, 'ready', 0, 0, 0)"
)


def test_jobs_and_plans_of_the_version_before_go_on(engine: sa.Engine) -> None:
    """Theirs from before are kept, and what they still write is without deadline or suspicion."""
    migrate(engine.url, "0002")
    for name in ("old", "late"):
        with engine.begin() as connection:
            connection.execute(JOB, {"id": name})
            connection.execute(MICRO_BATCH, {"id": name})
        migrate(engine.url)
    opened = Store(engine.url.render_as_string(hide_password=False))
    assert opened.stopping.expire() == []
    assert [(job.expires_at, job.expired) for job in opened.jobs.newest()] == [(None, False)] * 2
    assert [ref.isolated for ref in opened.planning.dispatchable(9)] == [False, False]
    opened.close()


def test_others_go_on_while_a_migration_waits_for_a_long_transaction(postgres_url: str) -> None:
    """PostgreSQL would put them all behind the migration, which waits for the slowest."""
    url = usable_url(postgres_url)
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    migrate(url, "0004")
    rename = sa.text("UPDATE job SET model = 'new' WHERE id = 'known'")
    waits = sa.text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    with ThreadPoolExecutor(1) as pool:
        with engine.connect() as uploading, engine.connect() as worker:
            worker.execute(JOB, {"id": "known"})
            worker.commit()
            uploading.execute(JOB, {"id": "long"})  # an upload of millions that lands
            migrating = pool.submit(migrate, url)

            def waiting() -> bool:
                worker.rollback()  # a transaction sees the activity that it saw first
                return bool(worker.scalar(waits)) or migrating.done()

            wait_until("the migration", waiting)
            worker.rollback()
            assert not migrating.done()
            worker.execute(sa.text("SET lock_timeout = '60s'"))
            assert worker.execute(rename).rowcount == 1
            worker.commit()
            assert not migrating.done()
            uploading.commit()
        migrating.result(60)
    with engine.connect() as connection:
        names = connection.scalars(sa.text("SELECT id FROM job WHERE priority = 0 ORDER BY id"))
        assert names.all() == ["known", "long"]
    engine.dispose()


def test_taking_suspects_and_deadlines_back_keeps_the_jobs(engine: sa.Engine) -> None:
    migrate(engine.url)
    with engine.begin() as connection:
        connection.execute(JOB, {"id": "kept"})
        connection.execute(MICRO_BATCH, {"id": "kept"})
    revert(engine.url, "0002")
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT id FROM job")).scalars().all() == ["kept"]
        assert connection.execute(sa.text("SELECT job_id FROM micro_batch")).scalars().all() == [
            "kept"
        ]


def test_taking_the_tables_of_bodies_back_keeps_what_was_asked(engine: sa.Engine) -> None:
    """The version before finds bodies where it left them, and plans all that has not ended."""
    opened = Store(engine.url.render_as_string(hide_password=False))
    opened.migrate()
    _, (done, waiting) = planned(opened, 3, each=2)
    claimed = claim(opened, done)
    assert opened.leases.finish(done.id, done.epoch, "worker", answers(claimed))
    opened.close()
    revert(engine.url, "0031")
    with engine.connect() as connection:
        rows = connection.execute(
            sa.text("SELECT row_index, body, state, micro_batch_id FROM request ORDER BY row_index")
        ).all()
        states = connection.execute(sa.text("SELECT id, state FROM micro_batch ORDER BY id")).all()
    assert [load_body(row.body)["prompt"] for row in rows] == ["a"] * 3
    assert [(row.state, row.micro_batch_id) for row in rows] == [
        *[("done", done.id)] * 2,
        ("queued", None),
    ]
    assert states == [(done.id, "done"), (waiting.id, "replanned")]


def test_taking_packs_back_keeps_what_was_asked_and_answered(engine: sa.Engine) -> None:
    opened = Store(engine.url.render_as_string(hide_password=False))
    opened.migrate()
    job_id, (done, _) = planned(opened, 7, each=5)
    claimed = claim(opened, done)
    assert opened.leases.finish(done.id, done.epoch, "worker", answers(claimed))
    opened.close()
    revert(engine.url, "0038")
    with engine.connect() as connection:
        bodies = connection.scalars(sa.text("SELECT body FROM request_body ORDER BY request_id"))
        assert [load_body(body)["prompt"] for body in bodies] == ["a"] * 7
        bodies = connection.scalars(sa.text("SELECT body FROM result ORDER BY row_index"))
        assert list(bodies) == [f'{{"text":"answer to row-{n}"}}' for n in range(5)]
    migrate(engine.url)
    opened = Store(engine.url.render_as_string(hide_password=False))
    texts = [record.body and record.body["text"] for record in opened.results.read(job_id)]
    assert texts == [f"answer to row-{n}" for n in range(5)]
    (waiting,) = opened.planning.dispatchable(9)
    assert [one.body["prompt"] for one in claim(opened, waiting).requests] == ["a"] * 2
    opened.close()


def test_upgrading_again_changes_nothing(store: Store) -> None:
    store.heartbeats.beat("worker", ComputeSeconds(engine_s=2.0, load_s=1.0))
    written = store.heartbeats.of_lease_holders(), store.heartbeats.compute_seconds()
    store.migrate()
    store.migrate()
    assert (store.heartbeats.of_lease_holders(), store.heartbeats.compute_seconds()) == written
    store.heartbeats.beat("worker", ComputeSeconds(engine_s=3.0, load_s=1.0))
    assert store.heartbeats.compute_seconds() == ComputeSeconds(engine_s=3.0, load_s=1.0)


def test_a_revision_that_fails_leaves_nothing(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = op.create_index

    def fail_in_the_middle(name: str, *args: object, **options: object) -> None:
        if name == "ix_result_failures":
            raise RuntimeError("the power went")
        created(name, *args, **options)

    monkeypatch.setattr(op, "create_index", fail_in_the_middle)
    with pytest.raises(RuntimeError, match="the power went"):
        migrate(engine.url)
    assert tables(engine) == set()


REQUEST = sa.text(
    "INSERT INTO request (job_id, row_index, line, custom_id, kind, body, state) "
    "VALUES (:id, :row, :row, :row, 'generate', '{}', 'queued')"
)


def indexes_of_requests(engine: sa.Engine) -> dict[str, bool]:
    """Whether they are valid, by name."""
    statement = sa.text(
        "SELECT c.relname, i.indisvalid FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
        "WHERE i.indrelid = to_regclass('request')"
    )
    with engine.connect() as connection:
        return {row.relname: row.indisvalid for row in connection.execute(statement)}


def test_an_index_is_built_while_others_write(postgres_url: str) -> None:
    """A plain build waits for `uploading`, and every writer waits behind it."""
    url = usable_url(postgres_url)
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    migrate(url, "0008")
    waits = sa.text("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX%'")
    with engine.begin() as connection:
        connection.execute(JOB, {"id": "known"})
    with ThreadPoolExecutor(1) as pool, engine.connect() as uploading, engine.connect() as worker:
        uploading.execute(REQUEST, {"id": "known", "row": 1})
        migrating = pool.submit(migrate, url, "0038")  # a later revision drops it

        def building() -> bool:
            worker.rollback()  # a transaction sees the activity that it saw first
            return bool(worker.scalar(waits)) or migrating.done()

        wait_until("the build", building)
        worker.rollback()
        worker.execute(sa.text("SET lock_timeout = '1s'"))
        for row in range(2, 20):
            worker.execute(REQUEST, {"id": "known", "row": row})
            worker.commit()
        assert not migrating.done()
        uploading.commit()
        migrating.result(60)
    assert indexes_of_requests(engine)["ix_request_unplanned"]
    engine.dispose()


def test_an_index_whose_build_was_interrupted_is_built_anew(postgres_url: str) -> None:
    url = usable_url(postgres_url)
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    migrate(url, "0008")
    with engine.begin() as connection:
        connection.execute(JOB, {"id": "known"})
        for row in range(2):
            connection.execute(REQUEST, {"id": "known", "row": row})
    building = sa.text("CREATE UNIQUE INDEX CONCURRENTLY ix_request_unplanned ON request (job_id)")
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(sa.exc.IntegrityError),
    ):
        connection.execute(building)
    assert not indexes_of_requests(engine)["ix_request_unplanned"]
    migrate(url, "0038")  # a later revision drops it
    assert all(indexes_of_requests(engine).values())
    assert "ix_request_queued" not in indexes_of_requests(engine)
    unique = {found["name"]: found["unique"] for found in sa.inspect(engine).get_indexes("request")}
    assert unique["ix_request_unplanned"] is False
    engine.dispose()


def test_a_migration_that_was_interrupted_before_an_index_goes_on(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = op.create_index

    def fail_at_one(name: str, *args: object, **options: object) -> None:
        if name == "ix_request_following":
            raise RuntimeError("the power went")
        created(name, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(op, "create_index", fail_at_one)
        with pytest.raises(RuntimeError, match="the power went"):
            migrate(engine.url)
    migrate(engine.url)
    assert differences(engine) == []


def test_threads_that_migrate_at_once(database_url: str) -> None:
    stores = [Store(database_url) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(Store.migrate, stores))
    for opened in stores:
        opened.ping()
        opened.close()


MIGRATE = "import sys; from nightjar.jobs.store import Store; Store(sys.argv[1]).migrate()"


@pytest.mark.parametrize(
    "database_url", [pytest.param("sqlite", marks=pytest.mark.slow), "postgresql"], indirect=True
)
def test_processes_that_migrate_at_once(database_url: str) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", MIGRATE, database_url]
    running = [subprocess.Popen(command, cwd=root) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    opened = Store(database_url)
    opened.ping()
    opened.close()


def test_there_is_one_newest_revision() -> None:
    assert len(ScriptDirectory.from_config(alembic_config()).get_heads()) == 1
