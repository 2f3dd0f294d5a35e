"""Where files of results go: the old or the new whole, and what may be replaced."""

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nightjar.jobs.records import ResultRecord
from nightjar.pipeline.tables.keys import Keys
from nightjar.pipeline.tables.sinks import swapping
from nightjar.pipeline.tables.sinks.sink import SinkCounts, SinkRefusedError, SinkWriteError
from tests.tables import SHOPS, ended, generated, left_beside, many, rows_of, sink


@pytest.mark.parametrize("target", ["out.jsonl", "out.parquet", "out/"])
@pytest.mark.parametrize("exchange", [True, False])
def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, target: str, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:  # as on a file system without it
        monkeypatch.setattr(swapping, "_exchange", lambda one, other: False)
    path = tmp_path / target
    config = {"jsonl" if "jsonl" in target else "parquet": f"{tmp_path}/{target}"}
    ended(sink(**config), generated(0, "a", "old"))
    before = rows_of(path)

    def broken() -> Iterator[ResultRecord]:
        yield from many(10_000)
        raise RuntimeError("the store is gone")

    with pytest.raises(RuntimeError):
        sink(**config).write(broken())
    assert rows_of(path) == before
    assert left_beside(path) == []
    ended(sink(**config), generated(0, "a", "new"))
    assert [one["text"] for one in rows_of(path)] == ["new"]
    assert left_beside(path) == []
    if path.is_dir():
        assert len(list(path.iterdir())) == 1


def test_a_kill_between_two_renames_is_mended(tmp_path: Path) -> None:
    config = {"parquet": f"{tmp_path}/out/"}
    ended(sink(**config), generated(0, "a", "old"))
    (tmp_path / "out").rename(tmp_path / ".out.nightjar-old")
    sink(**config).check()
    assert [one["text"] for one in rows_of(tmp_path / "out")] == ["old"]


def test_two_runs_have_no_file_name_in_common(tmp_path: Path) -> None:
    folder, names = tmp_path / "out", []
    for run in ("run-1", "run-2"):
        ended(sink(parquet=f"{folder}/", run=run), generated(0, "a", "x"))
        names += [one.name for one in folder.iterdir()]
    assert len(set(names)) == 2


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    link = tmp_path / "out.jsonl"
    link.symlink_to(tmp_path / "data" / "real.jsonl")
    ended(sink(jsonl=str(link)), generated(0, "a", "x"))
    assert link.is_symlink()
    assert "x" in (tmp_path / "data" / "real.jsonl").read_text()


def test_two_runs_do_not_write_at_once(tmp_path: Path) -> None:
    opened = sink(jsonl=f"{tmp_path}/out.jsonl")

    def within() -> Iterator[ResultRecord]:
        with pytest.raises(SinkRefusedError, match="another run writes"):
            sink(jsonl=f"{tmp_path}/out.jsonl").check()
        with pytest.raises(SinkWriteError, match="another run writes"):
            sink(jsonl=f"{tmp_path}/out.jsonl").write([])
        yield generated(0, "a", "x")

    assert opened.write(within()) == SinkCounts(1, 0)
    assert "x" in (tmp_path / "out.jsonl").read_text()


def foreign_file(path: Path) -> None:
    pq.write_table(pa.table({"user": ["mine"]}), path)


def test_data_of_others_is_not_replaced(tmp_path: Path) -> None:
    foreign_file(tmp_path / "mine.parquet")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 but cut")
    (tmp_path / "mine.jsonl").write_text('{"user": "mine"}\n')
    (tmp_path / "text.jsonl").write_text("hello\n")
    for name in ("mine.parquet", "cut.parquet", "mine.jsonl", "text.jsonl"):
        config = {name.partition(".")[2]: f"{tmp_path}/{name}"}
        with pytest.raises(SinkRefusedError, match="overwrite = true"):
            sink(**config).check()
        opened = sink(**config, overwrite=True)
        assert ended(opened, generated(0, "a", "x")) == SinkCounts(1, 0)
        sink(**config).check()  # it is ours now


def test_a_folder_of_others_is_never_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(SinkRefusedError, match=r"thesis\.txt, which is no Parquet"):
            sink(parquet=f"{folder}/", overwrite=overwrite).check()
    (folder / "thesis.txt").unlink()
    foreign_file(folder / "mine.parquet")
    with pytest.raises(SinkRefusedError, match="overwrite = true"):
        sink(parquet=f"{folder}/").check()
    ended(sink(parquet=f"{folder}/", overwrite=True), generated(0, "a", "x"))
    assert [one["user"] for one in rows_of(folder)] == ["a"]


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    wrong = {
        f"{tmp_path}/none/out.jsonl": "make it first",
        f"{tmp_path}/file/out.jsonl": "make it first",
        f"{tmp_path}/folder": "is a folder",
        f"{tmp_path}/pipe": "no regular file",
        "/proc/out.jsonl": "cannot be written",
    }
    for path, said in wrong.items():
        with pytest.raises(SinkRefusedError, match=said):
            sink(jsonl=path).check()
    with pytest.raises(SinkRefusedError, match="is a file"):
        sink(parquet=f"{tmp_path}/file/").check()
    for path in ("s3://bucket/out.jsonl", "s3://bucket/folder/"):
        with pytest.raises(SinkRefusedError, match="s3://bucket"):
            sink(**{"jsonl" if "jsonl" in path else "parquet": path})


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightjar.pipeline.tables.sinks.places.FREE_BYTES", 1 << 60)
    with pytest.raises(SinkRefusedError, match="is full"):
        sink(jsonl=f"{tmp_path}/out.jsonl").check()


def test_options_that_contradict_the_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SinkRefusedError, match="city, which is no key column"):
        sink(keys=SHOPS, parquet=f"{tmp_path}/out/", partition_by=["city"])
    with pytest.raises(SinkRefusedError, match="a file of its own"):
        sink(parquet=f"{tmp_path}/out/", partition_by=["user"])
    with pytest.raises(SinkRefusedError, match="text has the name of a column of results"):
        sink(keys=Keys(pa.schema([("text", pa.string())])), jsonl=f"{tmp_path}/out.jsonl")


def test_results_of_another_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SinkWriteError, match="another table"):
        sink(keys=SHOPS, jsonl=f"{tmp_path}/o.jsonl").write([generated(0, "user-1", "x")])
