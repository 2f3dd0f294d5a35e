"""Results as an object of an object store: a real server with S3's interface."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer
from pyarrow import fs

from nightjar.jobs.records import ResultRecord
from nightjar.pipeline.tables.sinks.sink import SinkRefusedError, SinkWriteError
from tests.tables import ended, generated, many, sink

BUCKET = "results"


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What a URL says of the server, which has an empty bucket."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        found = f"?endpoint_override=127.0.0.1:{server.get_host_and_port()[1]}&scheme=http"
        store, path = fs.FileSystem.from_uri(f"s3://{BUCKET}/{found}&allow_bucket_creation=true")
        store.create_dir(path)
        yield found
    finally:
        server.stop()


def test_an_object_is_the_old_or_the_new_whole(options: str, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/nightly/out.parquet{options}"
    store, path = fs.FileSystem.from_uri(url)
    ended(sink(parquet=url), generated(0, "a", "old"))
    seen: list[list[str]] = []

    def look() -> Iterator[ResultRecord]:
        yield from many(5_000)
        seen.append(pq.read_table(path, filesystem=store)["text"].to_pylist())

    sink(parquet=url).write(look())
    assert seen == [["old"]]
    assert pq.read_table(path, filesystem=store).num_rows == 5_000

    def broken() -> Iterator[ResultRecord]:
        yield from many(5_000)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        sink(parquet=url).write(broken())
    assert pq.read_table(path, filesystem=store).num_rows == 5_000
    names = [one.path for one in store.get_file_info(fs.FileSelector(BUCKET, recursive=True))]
    assert sorted(names) == [f"{BUCKET}/nightly", path]


def test_what_cannot_be_written_is_told_before(options: str) -> None:
    url = f"s3://{BUCKET}/mine.parquet{options}"
    store, path = fs.FileSystem.from_uri(url)
    pq.write_table(pa.table({"mine": [1]}), path, filesystem=store)
    with pytest.raises(SinkRefusedError, match="overwrite = true") as caught:
        sink(parquet=url).check()
    assert "endpoint" not in str(caught.value)
    ended(sink(parquet=url, overwrite=True), generated(0, "a", "x"))
    with pytest.raises(SinkRefusedError, match=r"s3://nobody/out\.parquet cannot be written"):
        sink(parquet=f"s3://nobody/out.parquet{options}").check()
    with pytest.raises(SinkWriteError, match="cannot be written"):
        sink(parquet=f"s3://nobody/out.parquet{options}").write([generated(0, "a", "x")])
    with pytest.raises(SinkRefusedError, match=r"s3://bucket/a/: an object store cannot replace"):
        sink(parquet="s3://key:secret@bucket/a/")
