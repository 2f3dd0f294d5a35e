"""Exports of jobs that are over: whole or not to be seen, and continued after any end."""

import errno
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer
from pyarrow import fs

from nightjar.jobs.errors import PurgedJobError, StoreUnavailableError
from nightjar.jobs.purge_records import PurgeScope
from nightjar.jobs.store import Store
from nightjar.pipeline.exports import exporting, parquet
from nightjar.pipeline.exports.exporting import ExportError, Progress, export
from nightjar.pipeline.exports.plan import MANIFEST, Format, Manifest, Plan
from nightjar.pipeline.exports.target import FolderTarget, TargetError, target_of
from nightjar.pipeline.exports.writing import IncompleteError, write_part
from tests.bulk_jobs import finished_job
from tests.jobs import submit

pytestmark = pytest.mark.one_database
ROWS, EACH = 25, 10


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder to export to."""
    return tmp_path / "out"


def plan_of(store: Store, job_id: str, format_: Format = "jsonl") -> Plan:
    return Plan.of(store.jobs.get(job_id), format_, EACH)


def exported(
    store: Store, job_id: str, place: Path | str, format_: Format = "jsonl", processes: int = 1
) -> Manifest:
    opened = partial(Store, store.database.engine.url.render_as_string(hide_password=False))
    return export(store, opened, plan_of(store, job_id, format_), str(place), processes)


def lines(folder: Path, manifest: Manifest) -> list[str]:
    texts = [(folder / one.name).read_text(encoding="utf-8") for one in manifest.files]
    return [json.loads(line)["custom_id"] for text in texts for line in text.splitlines()]


def test_an_export_holds_every_row_once_in_order(store: Store, out: Path) -> None:
    job_id = finished_job(store, ROWS)
    manifest = exported(store, job_id, out, processes=2)
    assert msgspec.json.decode((out / MANIFEST).read_bytes(), type=Manifest) == manifest
    assert [one.rows for one in manifest.files] == [10, 10, 5]
    assert lines(out, manifest) == [record.custom_id for record in store.results.iterate(job_id)]
    for one in manifest.files:
        data = (out / one.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (one.bytes, one.sha256)
    files = {path.name for path in out.iterdir()}
    assert files == {
        MANIFEST,
        "_parts",
        ".nightjar-export.lock",
        *(one.name for one in manifest.files),
    }


def test_parquet_holds_the_same_rows(store: Store, out: Path) -> None:
    job_id = finished_job(store, ROWS)
    exported(store, job_id, out, "parquet")
    found = pq.read_table(out).to_pylist()  # readers of a folder leave out what begins with _ or .
    wanted = list(store.results.iterate(job_id))
    assert [row["custom_id"] for row in found] == [record.custom_id for record in wanted]
    assert [json.loads(row["body"]) for row in found] == [record.body for record in wanted]
    assert {row["status_code"] for row in found} == {200}


def test_a_row_group_of_parquet_is_bounded_in_bytes(
    store: Store, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = finished_job(store, ROWS)
    raw = list(store.results.iterate_raw(job_id))
    size = len(memoryview(raw[0].body))
    monkeypatch.setattr(parquet, "GROUP_BYTES", 3 * size)
    path = out.with_suffix(".parquet")
    parquet.write_parquet(path, raw)
    file = pq.ParquetFile(path)
    groups = [file.read_row_group(number) for number in range(file.num_row_groups)]
    assert max(sum(map(len, group["body"].to_pylist())) for group in groups) <= 3 * size
    assert [row for group in groups for row in group["line"].to_pylist()] == [
        record.line for record in raw
    ]
    monkeypatch.setattr(parquet, "GROUP_BYTES", 1)
    parquet.write_parquet(path, raw)
    assert pq.ParquetFile(path).num_row_groups == ROWS
    monkeypatch.setattr(parquet, "GROUP_BYTES", 1 << 20)
    monkeypatch.setattr(parquet, "GROUP_ROWS", 4)
    parquet.write_parquet(path, raw)
    assert pq.ParquetFile(path).num_row_groups == 7


def test_what_is_whole_is_not_written_again(store: Store, out: Path) -> None:
    job_id = finished_job(store, ROWS)
    plan, target = plan_of(store, job_id), target_of(str(out))
    with target.held():
        write_part(store, target, plan, plan.parts[1])
    before = (out / plan.parts[1].name).stat()
    (out / plan.parts[0].name).write_text("of an export that was killed")  # without its note
    manifest = exported(store, job_id, out)
    assert len(lines(out, manifest)) == ROWS
    assert (out / plan.parts[1].name).stat().st_mtime_ns == before.st_mtime_ns


def test_a_file_that_was_removed_is_written_again(store: Store, out: Path) -> None:
    job_id = finished_job(store, ROWS)
    first = exported(store, job_id, out)
    (out / first.files[0].name).unlink()
    (out / first.files[1].name).write_text("cut")
    assert exported(store, job_id, out) == first
    assert len(lines(out, first)) == ROWS


def test_a_job_is_noted_as_exported_only_with_its_manifest(
    store: Store, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = finished_job(store, ROWS, days=30)
    (out / MANIFEST).mkdir(parents=True)  # so that it cannot be written
    with pytest.raises(ExportError, match="cannot be read: Is a directory"):
        exported(store, job_id, out)
    (out / MANIFEST).rmdir()
    scope = PurgeScope(keep_s=7 * 86_400, only_exported=True)
    made = FolderTarget.made

    def full(self: FolderTarget, name: str) -> AbstractContextManager[Path]:
        if name == MANIFEST:
            raise OSError(errno.ENOSPC, "No space left on device")
        return made(self, name)

    monkeypatch.setattr(FolderTarget, "made", full)
    with pytest.raises(OSError, match="No space left"):
        exported(store, job_id, out)
    assert store.retention.sweep(scope).jobs == 0
    monkeypatch.undo()
    monkeypatch.setattr(store.jobs, "note_exported", lambda *_: False)  # a retry came first
    with pytest.raises(ExportError, match="rows of the job are retried since"):
        exported(store, job_id, out)
    assert not (out / MANIFEST).exists()


def test_an_export_of_other_results_replaces_the_files(store: Store, out: Path) -> None:
    first, second = (finished_job(store, rows) for rows in (ROWS, 2 * EACH))
    old = exported(store, first, out)
    new = exported(store, second, out)
    assert not {one.name for one in old.files} & {path.name for path in out.iterdir()}
    assert lines(out, new) == [record.custom_id for record in store.results.iterate(second)]


@pytest.mark.parametrize("rows", [0, 1])
def test_a_killed_export_leaves_nothing_half(out: Path, rows: int) -> None:
    target = target_of(str(out))

    def ended() -> None:
        with target.held(), target.made("part") as path:
            path.write_bytes(b"x" * rows)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ended()
    (out / ".nightjar-export-1234").write_bytes(b"left by a process that was killed")
    with target.held():
        assert [path.name for path in out.iterdir()] == [".nightjar-export.lock"]


def test_a_target_that_fills_up_is_named_and_the_rest_follows(store: Store, out: Path) -> None:
    """The limit of a file's size stands for a full disk: both end a write in the middle."""
    job_id = finished_job(store, 300)
    url = store.database.engine.url.render_as_string(hide_password=False)
    limited = (
        "import resource, signal, sys\n"
        "from nightjar.jobs.store import Store\n"
        "from nightjar.pipeline.exports.plan import Plan\n"
        "from nightjar.pipeline.exports.target import target_of\n"
        "from nightjar.pipeline.exports.writing import write_part\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "store = Store(sys.argv[1])\n"
        "plan = Plan.of(store.jobs.get(sys.argv[2]), 'jsonl', 200)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000))\n"
        "write_part(store, target_of(sys.argv[3]), plan, plan.parts[0])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", limited, url, job_id, str(out)],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert "File too large" in found.stderr
    assert [path for path in out.rglob("*") if path.is_file()] == []
    assert sum(one.rows for one in exported(store, job_id, out).files) == 300


def test_a_target_that_loses_its_place_says_so(store: Store, out: Path) -> None:
    job_id = finished_job(store, ROWS)
    out.mkdir()
    (out / "_parts").write_text("a file where a folder should be")
    with pytest.raises(
        ExportError, match=r"part-0000\d-.*: Not a directory. \d of 3 files are written; run"
    ):
        exported(store, job_id, out)
    assert not (out / MANIFEST).exists()
    (out / "_parts").unlink()
    assert exported(store, job_id, out).rows == ROWS


def test_two_exports_do_not_write_into_one_folder(store: Store, out: Path) -> None:
    job_id = finished_job(store, ROWS)
    with target_of(str(out)).held(), pytest.raises(TargetError, match="another export"):
        exported(store, job_id, out)
    (out / MANIFEST).write_text('{"of": "something else"}')
    with pytest.raises(ExportError, match="is not of an export; name another place"):
        exported(store, job_id, out)
    with pytest.raises(TargetError, match="name a folder, s3://"):
        target_of("ftp://host/place")


def test_a_job_that_changes_meanwhile_is_not_exported(store: Store, out: Path) -> None:
    job_id = finished_job(store, ROWS)
    plan, target = plan_of(store, job_id), target_of(str(out))
    longer = replace(plan, parts=(msgspec.structs.replace(plan.parts[2], last=39),))
    with pytest.raises(IncompleteError, match="5 of rows 20 to 39 have results"):
        write_part(store, target, longer, longer.parts[0])
    assert store.retention.sweep(PurgeScope(job_id=job_id)).jobs == 1
    with pytest.raises(PurgedJobError):
        write_part(store, target, plan, plan.parts[0])
    with pytest.raises(ExportError, match=r"were purged .* 0 of 3 files are written"):
        export(store, partial(Store, str(store.database.engine.url)), plan, str(out), 1)
    assert not (out / MANIFEST).exists()


def test_only_what_is_exported_is_purged_where_that_is_asked_for(store: Store, out: Path) -> None:
    kept, gone = (finished_job(store, ROWS, days=30) for _ in range(2))
    exported(store, gone, out)
    scope = PurgeScope(keep_s=7 * 86_400, only_exported=True)
    assert store.retention.sweep(scope).jobs == 1
    assert [store.jobs.get(one).purged_at is None for one in (kept, gone)] == [True, False]
    assert store.retention.sweep(replace(scope, job_id=kept)).jobs == 1  # it was named


@pytest.mark.parametrize("lost", [2, 3])
def test_a_database_that_is_away_is_asked_again(
    store: Store, out: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    job_id, pauses = finished_job(store, ROWS), list[float]()
    url = store.database.engine.url.render_as_string(hide_password=False)

    def opened() -> Store:
        if len(pauses) < lost:
            raise StoreUnavailableError("the database is away")
        return Store(url)

    monkeypatch.setattr(exporting.time, "sleep", pauses.append)
    plan = plan_of(store, job_id)
    if lost < exporting.ATTEMPTS:
        assert export(store, opened, plan, str(out), 1).rows == ROWS
    else:
        with pytest.raises(ExportError, match=r"the database is away\. 0 of 3 files are written"):
            export(store, opened, plan, str(out), 1)
    assert pauses == [1.0, 4.0]


def test_rows_without_an_answer_are_exported_too(store: Store, out: Path) -> None:
    job_id = submit(store, [{"prompt": text, "max_tokens": 4} for text in "abc"])
    store.stopping.cancel(job_id)
    store.stopping.finish(10)
    found = [
        json.loads(line)
        for one in exported(store, job_id, out).files
        for line in (out / one.name).read_text(encoding="utf-8").splitlines()
    ]
    assert [line["custom_id"] for line in found] == ["row-0", "row-1", "row-2"]
    assert {line["error"]["code"] for line in found} == {"batch_cancelled"}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ThreadedMotoServer]:
    """An empty bucket of a real server with S3's interface; the test stops it."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    options = f"?endpoint_override=127.0.0.1:{port}&scheme=http"
    store, path = fs.FileSystem.from_uri(f"s3://out/{options}&allow_bucket_creation=true")
    store.create_dir(path)
    return f"s3://out/night{options}", server


def test_an_object_store_holds_what_a_folder_holds(
    store: Store, bucket: tuple[str, ThreadedMotoServer], out: Path
) -> None:
    (url, server), job_id = bucket, finished_job(store, ROWS)
    target = target_of(url)
    assert (target.read(MANIFEST), target.size(MANIFEST)) == (None, None)
    first, local = exported(store, job_id, url), exported(store, job_id, out)
    assert first == local
    for one in first.files:
        assert target.read(one.name) == (out / one.name).read_bytes()
        assert target.size(one.name) == one.bytes
    assert exported(store, job_id, url) == first
    others = exported(store, job_id, url, "parquet")
    assert {target.size(one.name) for one in first.files} == {None}
    assert [target.size(one.name) for one in others.files] == [one.bytes for one in others.files]
    server.stop()


@pytest.mark.slow  # the client of S3 waits long for a server that is gone
def test_an_object_store_that_goes_away_in_the_middle(
    sqlite_url: str, bucket: tuple[str, ThreadedMotoServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, (url, server) = Store(sqlite_url), bucket
    store.migrate()
    plan = plan_of(store, finished_job(store, ROWS))
    again = ThreadedMotoServer(
        ip_address="127.0.0.1", port=server.get_host_and_port()[1], verbose=False
    )
    pauses: list[float] = []

    def export_it(after_first: Callable[[], None]) -> Manifest:
        def tell(progress: Progress) -> None:
            if progress.parts == 1:
                after_first()

        return export(store, partial(Store, sqlite_url), plan, url, 1, tell)

    monkeypatch.setattr(exporting.time, "sleep", pauses.append)
    with pytest.raises(ExportError, match=r"part-00001-.* 1 of 3 files are written; run the same"):
        export_it(server.stop)
    assert pauses == [1.0, 4.0]
    again.start()
    try:
        target = target_of(url)
        assert target.read(MANIFEST) is None
        # This time it is back at the second attempt.
        back = ThreadedMotoServer(
            ip_address="127.0.0.1", port=server.get_host_and_port()[1], verbose=False
        )
        monkeypatch.setattr(exporting.time, "sleep", lambda _: back.start())
        manifest = export_it(again.stop)
        assert [one.rows for one in manifest.files] == [10, 10, 5]
        for one in manifest.files:
            data = target.read(one.name)
            assert data is not None
            assert (len(data), hashlib.sha256(data).hexdigest()) == (one.bytes, one.sha256)
    finally:
        back.stop()
