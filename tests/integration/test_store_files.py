"""Files in the store: whole or invisible, a tenant's own, read part by part, freed in steps."""

import hashlib
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from nightjar.jobs.errors import FileInUseError, LostUploadError, UnknownFileError
from nightjar.jobs.file_records import (
    ABANDONED_AFTER_S,
    PART_BYTES,
    FilePurpose,
    FileState,
    NewFile,
    StoredFile,
)
from nightjar.jobs.store import Store, file_sweeping
from nightjar.jobs.store.file_sweeping import PARTS_PER_STEP
from nightjar.jobs.store.file_tables import file, file_part
from nightjar.pipeline.queue.sweeper import Sweeper
from tests.clock import Clock

US, THEM = "us", "them"


def upload(
    store: Store,
    parts: int = 1,
    tenant: str = US,
    expires_after_s: float | None = None,
    size: int = 10,
) -> StoredFile:
    """A file of so many parts, each of other bytes."""
    file_id = store.files.begin(NewFile(tenant, "in.jsonl"))
    data = [bytes([number % 256]) * size for number in range(parts)]
    for number, part in enumerate(data):
        store.files.append(file_id, number, part)
    digest = hashlib.sha256(b"".join(data)).hexdigest()
    return store.files.end(file_id, size * parts, digest, expires_after_s)


def count(store: Store, table: sa.Table) -> int:
    with store.database.reading() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0


def state_of(store: Store, file_id: str) -> FileState | None:
    with store.database.reading() as connection:
        return connection.scalar(sa.select(file.c.state).where(file.c.id == file_id))


def set_expiry(store: Store, file_id: str, moment: datetime) -> None:
    statement = sa.update(file).where(file.c.id == file_id).values(expires_at=moment)
    store.database.write(lambda connection: connection.execute(statement))


def a_second_ago() -> datetime:
    return datetime.now(UTC) - timedelta(seconds=1)


def test_a_file_is_read_back_part_by_part(store: Store) -> None:
    stored = upload(store, 3, size=PART_BYTES)
    assert store.files.get(stored.id, US) == stored
    assert (stored.bytes, stored.state) == (3 * PART_BYTES, FileState.PROCESSED)
    assert (stored.filename, stored.purpose) == ("in.jsonl", FilePurpose.BATCH)
    parts = list(store.files.parts(stored.id))
    assert [len(part) for part in parts] == [PART_BYTES] * 3
    assert hashlib.sha256(b"".join(parts)).hexdigest() == stored.sha256


def test_a_part_has_a_bound(store: Store) -> None:
    file_id = store.files.begin(NewFile(US, "in.jsonl"))
    for data in (b"", bytes(PART_BYTES + 1)):
        with pytest.raises(ValueError, match="1 to 1048576 bytes"):
            store.files.append(file_id, 0, data)


def test_postgres_stores_a_part_as_it_is(postgres_url: str) -> None:
    """And does not compress what a batch would have to unpack again."""
    store = Store(postgres_url)
    store.migrate()
    upload(store, size=PART_BYTES)  # of one byte: it would be a few bytes
    with store.database.reading() as connection:
        size = connection.scalar(sa.func.pg_column_size(file_part.c.data).select())
    assert size == PART_BYTES
    store.close()


def test_half_an_upload_is_invisible(store: Store) -> None:
    file_id = store.files.begin(NewFile(US, "in.jsonl"))
    store.files.append(file_id, 0, b"half")
    with pytest.raises(UnknownFileError):
        store.files.get(file_id, US)
    with pytest.raises(UnknownFileError):
        list(store.files.parts(file_id))
    with pytest.raises(UnknownFileError):
        store.files.delete(file_id, US)
    assert store.files.newest(10, US) == []
    with pytest.raises(UnknownFileError):
        store.files.newest(10, US, after=file_id)


def test_a_file_that_lacks_a_part_does_not_become_visible(store: Store) -> None:
    file_id = store.files.begin(NewFile(US, "in.jsonl"))
    store.files.append(file_id, 0, b"half")
    with pytest.raises(LostUploadError):
        store.files.end(file_id, 8, "0" * 64)
    assert store.files.newest(10, US) == []


def test_a_file_is_its_tenant_s_alone(store: Store) -> None:
    ours, theirs = upload(store), upload(store, tenant=THEM)
    for act in (store.files.get, store.files.delete):
        with pytest.raises(UnknownFileError, match=theirs.id):
            act(theirs.id, US)
    assert store.files.newest(10, US) == [ours]
    with pytest.raises(UnknownFileError):
        store.files.newest(10, US, after=theirs.id)
    assert store.files.get(theirs.id, THEM) == theirs


def add_result(store: Store, tenant: str = US, expires_at: datetime | None = None) -> str:
    return store.database.write(
        lambda connection: store.files.add_result_file(
            connection, tenant, "job_1", "failed", 77, "out.jsonl", expires_at
        )
    )


def test_a_result_file_is_listed_and_has_no_parts(store: Store) -> None:
    expires_at = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    added = store.files.get(add_result(store, expires_at=expires_at), US)
    assert (added.job_id, added.outcome, added.bytes) == ("job_1", "failed", 77)
    assert (added.purpose, added.expires_at) == (FilePurpose.BATCH_OUTPUT, expires_at)
    assert store.files.newest(10, US) == [added]
    assert count(store, file_part) == 0
    assert store.files.stored_bytes(US) == 0


def test_listings_go_on_behind_a_file_in_both_orders(store: Store) -> None:
    made = []
    for turn in range(6):
        made.append(upload(store).id if turn % 2 else add_result(store))
        time.sleep(0.002)  # ids of one millisecond are in no order
    upload(store, tenant=THEM)

    def walk(**asked: object) -> list[str]:
        found: list[str] = []
        while page := store.files.newest(2, US, found[-1] if found else None, **asked):  # type: ignore[arg-type]
            assert len(page) <= 2
            found += [one.id for one in page]
        return found

    assert walk() == made[::-1]
    assert walk(order="asc") == made
    assert walk(purpose=FilePurpose.BATCH) == made[5::-2]
    assert walk(purpose=FilePurpose.BATCH_OUTPUT, order="asc") == made[::2]
    with pytest.raises(UnknownFileError):
        store.files.newest(2, US, made[0], FilePurpose.BATCH)


def test_a_client_may_delete_what_it_lists(store: Store) -> None:
    """The next page is asked for behind a file that is gone."""
    for _ in range(5):
        upload(store)
    after, deleted = None, 0
    while page := store.files.newest(2, US, after):
        for one in page:
            store.files.delete(one.id, US)
            after, deleted = one.id, deleted + 1
        store.file_sweeping.sweep_files()
    assert deleted == 5
    assert store.files.newest(10, US) == []


@pytest.fixture
def freed(store: Store) -> Iterator[list[int]]:
    """How many parts each transaction has deleted."""
    sizes: list[int] = []
    left = [0]

    def measure(connection: sa.Connection) -> None:
        now = connection.scalar(sa.select(sa.func.count()).select_from(file_part)) or 0
        if now < left[0]:
            sizes.append(left[0] - now)
        left[0] = now

    engine = store.database.engine
    sa.event.listen(engine, "commit", measure)
    yield sizes
    sa.event.remove(engine, "commit", measure)


def test_a_deleted_file_is_gone_at_once_and_freed_in_steps(store: Store, freed: list[int]) -> None:
    stored, kept = upload(store, 2 * PARTS_PER_STEP + 1), upload(store)
    assert store.files.stored_bytes(US) == stored.bytes + kept.bytes
    reading = store.files.parts(stored.id)
    next(reading)
    store.files.delete(stored.id, US)
    for act in (store.files.get, store.files.delete):
        with pytest.raises(UnknownFileError):
            act(stored.id, US)
    assert store.files.newest(10, US) == [kept]
    assert store.files.stored_bytes(US) == kept.bytes
    assert store.file_sweeping.sweep_files() == 2 * PARTS_PER_STEP + 1
    assert freed == [PARTS_PER_STEP, PARTS_PER_STEP, 1]
    with pytest.raises(UnknownFileError):
        list(reading)  # not: the half that was there
    assert list(store.files.parts(kept.id)) == [bytes(10)]


def test_sweeping_stops_when_its_time_is_over_and_goes_on_later(
    store: Store, freed: list[int]
) -> None:
    stored = upload(store, 2 * PARTS_PER_STEP)
    store.files.delete(stored.id, US)
    assert store.file_sweeping.sweep_files(patience_s=0) == PARTS_PER_STEP
    assert state_of(store, stored.id) is FileState.DELETING
    assert store.file_sweeping.sweep_files() == PARTS_PER_STEP
    assert freed == [PARTS_PER_STEP] * 2
    assert state_of(store, stored.id) is FileState.DELETED


def test_the_row_of_a_deleted_file_goes_later(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_sweeping, "KEPT_S", 0)
    stored = upload(store)
    store.files.delete(stored.id, US)
    store.file_sweeping.sweep_files()
    assert state_of(store, stored.id) is FileState.DELETED
    store.file_sweeping.sweep_files()
    assert (count(store, file), count(store, file_part)) == (0, 0)


def test_an_expired_file_is_invisible_before_it_is_swept(store: Store) -> None:
    lasting, expired = upload(store, expires_after_s=3_600), upload(store)
    assert lasting.expires_at == lasting.created_at + timedelta(hours=1)
    set_expiry(store, expired.id, a_second_ago())
    with pytest.raises(UnknownFileError):
        store.files.get(expired.id, US)
    assert store.files.newest(10, US) == [lasting]
    assert store.file_sweeping.sweep_files() == 1
    assert state_of(store, expired.id) is FileState.DELETED
    assert store.files.newest(10, US, after=None) == [lasting]


def test_a_file_in_use_is_neither_deleted_nor_swept(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, other = upload(store), upload(store)
    monkeypatch.setattr(store.files, "is_in_use", lambda _, file_id: file_id == held.id)
    with pytest.raises(FileInUseError, match="being validated"):
        store.files.delete(held.id, US)
    for one in (held, other):
        set_expiry(store, one.id, a_second_ago())
    assert store.file_sweeping.sweep_files() == 1
    assert list(store.files.parts(held.id)) == [bytes(10)]
    monkeypatch.undo()
    assert store.file_sweeping.sweep_files() == 1


def test_the_sweeper_takes_an_upload_that_lost_its_process(store: Store) -> None:
    clock = Clock()
    sweeper = Sweeper(
        store,
        dead_after_s=10,
        redispatch_after_s=60,
        longest_gap_s=ABANDONED_AFTER_S,
        deaths_allowed=3,
        clock=clock,
    )
    dead, alive = (store.files.begin(NewFile(US, "in.jsonl")) for _ in range(2))
    for file_id in (dead, alive):
        store.files.append(file_id, 0, b"half")
    sweeper.sweep()
    clock.now += ABANDONED_AFTER_S - 1
    sweeper.sweep()
    assert state_of(store, dead) is FileState.UPLOADING
    store.files.beat(alive)
    clock.now += 1
    sweeper.sweep()
    assert [state_of(store, one) for one in (dead, alive)] == [
        FileState.DELETED,
        FileState.UPLOADING,
    ]
    assert count(store, file_part) == 1
    with pytest.raises(LostUploadError):
        store.files.append(dead, 1, b"the other half")
    with pytest.raises(LostUploadError):
        store.files.end(dead, 4, "0" * 64)
    store.files.append(alive, 1, b"the other half")
    assert store.files.end(alive, 18, "0" * 64).bytes == 18


def test_an_upload_that_moved_meanwhile_is_not_taken_back(store: Store) -> None:
    file_id = store.files.begin(NewFile(US, "in.jsonl"))
    ((_, counter),) = store.file_sweeping.uploading()
    store.files.beat(file_id)
    assert not store.file_sweeping.take_back(file_id, counter)
    assert state_of(store, file_id) is FileState.UPLOADING


def test_an_abandoned_upload_is_swept_at_once(store: Store) -> None:
    file_id = store.files.begin(NewFile(US, "in.jsonl"))
    store.files.append(file_id, 0, b"half")
    store.files.abandon(file_id)
    assert store.file_sweeping.uploading() == []
    assert store.file_sweeping.sweep_files() == 1
    assert store.files.stored_bytes(US) == 0
