"""Rows of an object store: a real server with S3's interface."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer
from pyarrow import fs

from nightjar.pipeline.tables.sources.piece import SourceError
from nightjar.pipeline.tables.sources.places import S3Options, list_files
from tests.tasks import prompts, rendered, write_task


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server with some objects, and the variables that reach it."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        address = f"127.0.0.1:{server.get_host_and_port()[1]}"
        store = fs.S3FileSystem(
            endpoint_override=address, scheme="http", allow_bucket_creation=True
        )
        store.create_dir("lake")
        for day in (23, 24):
            table = pa.table({"id": [day * 10, day * 10 + 1], "review": ["a", "b"]})
            pq.write_table(table, f"lake/reviews/day=2026-11-{day}/1.parquet", filesystem=store)
        with store.open_output_stream("lake/more.csv") as stream:
            stream.write(b"id,review\n7,hello\n")
        yield f"http://{address}"
    finally:
        server.stop()


def test_a_data_set_with_partitions(endpoint: str, tmp_path: Path) -> None:
    source = f'parquet = "s3://lake/reviews/"\ns3 = {{endpoint = "{endpoint}"}}'
    rows = rendered(write_task(tmp_path, 'prompt = "{day}: {review}"', source=source))
    assert [row.custom_id for row in rows] == ["[230]", "[231]", "[240]", "[241]"]
    assert prompts(rows)[1:3] == ["2026-11-23: b", "2026-11-24: a"]


def test_the_usual_variable_names_the_service(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    rows = rendered(write_task(tmp_path, source='csv = "s3://lake/more.csv"'))
    assert (rows[0].custom_id, prompts(rows)) == ("7", ["hello"])


def test_objects_that_are_not_there(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="s3://lake/none: there is no such file or folder"):
        list_files("s3://lake/none", tmp_path, (".parquet",), S3Options(endpoint))
