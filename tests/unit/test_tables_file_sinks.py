"""JSON lines and Parquet: the columns by kind, whole files, and what may be replaced."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from nightjar.jobs.records import ResultRecord
from nightjar.pipeline.tables.sinks import parquet
from nightjar.pipeline.tables.sinks.sink import (
    SinkCounts,
    SinkWriteError,
)
from tests.tables import (
    SHOPS,
    ended,
    failed,
    generated,
    left_beside,
    many,
    ranked,
    record,
    rows_of,
    sink,
)


def test_texts_and_failures_are_in_one_table(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    answers = [generated(0, "a", "하나"), failed(1, "b", param="body.prompt")]
    assert ended(sink(parquet=str(path)), *answers) == SinkCounts(1, 1)
    table = pq.read_table(path)
    nothing = {"text": None, "finish_reason": None, "model": None}
    nothing |= {"prompt_tokens": None, "completion_tokens": None}
    no_error = {"error_code": None, "error_message": None, "error_param": None}
    assert table.to_pylist() == [
        {"user": "a", "text": "하나", "finish_reason": "stop", "prompt_tokens": 3}
        | {"completion_tokens": 2, "model": "tiny"}
        | no_error,
        {"user": "b"}
        | nothing
        | {"error_code": "context_exceeded", "error_message": "line 2: too long"}
        | {"error_param": "body.prompt"},
    ]
    assert left_beside(path) == []


def test_a_chat_and_several_answers_a_row(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    said = [{"role": "user", "content": "hi"}]
    ended(sink("chat", parquet=str(path)), generated(0, "a", "one", messages=said))
    assert pq.read_table(path)["text"].to_pylist() == ["one"]
    several = generated(0, "a", "one", "two"), failed(1, "b")
    ended(sink("generate", n=2, parquet=str(path)), *several)
    table = pq.read_table(path)
    assert table["text"].to_pylist() == [["one", "two"], None]
    assert table["finish_reason"].to_pylist() == [["stop", "stop"], None]
    assert table["completion_tokens"].to_pylist() == [4, None]


def test_a_ranking_keeps_the_order_of_the_documents(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    ended(
        sink("rank", parquet=str(path)),
        ranked(0, "a", [2.0, 1.0, 3.0]),
        ranked(1, "b", [2.0, None, 1.0, None], top_n=2),
        ranked(2, "c", [1.0, 2.0, 3.0], top_n=1),
    )
    table = pq.read_table(path)
    assert table["ranking"].to_pylist() == [[1, 0, 2], [2, 0], [0]]
    first, second, third = table["scores"].to_pylist()
    assert first == pytest.approx([0.1353, 0.3679, 0.0498], abs=1e-4)
    assert second == [pytest.approx(0.1353, abs=1e-4), None, pytest.approx(0.3679, abs=1e-4), None]
    assert third == [pytest.approx(0.3679, abs=1e-4), None, None]
    assert table.schema.field("scores").type == pa.list_(pa.float64())
    assert table["prompt_tokens"].to_pylist() == [14, 18, 14]


def test_a_ranking_of_a_version_before_is_as_long_as_can_be_known(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    old = ranked(0, "a", [2.0, None, 1.0, None], top_n=2)
    assert old.body is not None
    del old.body["document_count"]
    ended(sink("rank", parquet=str(path)), old)
    assert [len(one) for one in pq.read_table(path)["scores"].to_pylist()] == [3]


def test_a_score_is_the_mean_of_its_text(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    ended(sink("score", jsonl=str(path)), ranked(0, "a", [1.25]))
    assert json.loads(path.read_text()) == {
        **{"user": "a", "score": 1.25, "token_count": 4, "prompt_tokens": 6, "model": "tiny"},
        **{"error_code": None, "error_message": None, "error_param": None},
    }


def test_failures_without_a_key_of_their_own_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    rows = generated(0, "a", "x"), failed(1, "a", "duplicate_custom_id"), failed(2, None)
    assert ended(sink(jsonl=str(path)), *rows) == SinkCounts(1, 0, left_out=2)
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_failures_in_a_file_of_their_own(tmp_path: Path, kind: str) -> None:
    path, errors = tmp_path / f"out.{kind}", tmp_path / f"bad.{kind}"
    opened = sink(**{kind: str(path)}, errors=str(errors))
    assert ended(opened, generated(0, "a", "x"), failed(1, "b")) == SinkCounts(1, 1)
    (answer,) = rows_of(path)
    assert answer["user"] == "a"
    assert "error_code" not in answer
    assert rows_of(errors) == [
        {"user": "b", "error_code": "context_exceeded", "error_message": "line 2: too long"}
        | {"error_param": None}
    ]


def test_keys_of_several_columns_have_their_types(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    id_ = '["s","2026-11-24",7]'
    ended(sink(keys=SHOPS, jsonl=str(path)), generated(0, id_, "x"))
    assert [*json.loads(path.read_text()).items()][:3] == [
        *{"shop": "s", "day": "2026-11-24", "id": 7}.items()
    ]
    ended(sink(keys=SHOPS, parquet=str(tmp_path / "out.parquet")), generated(0, id_, "x"))
    assert pq.read_schema(tmp_path / "out.parquet").types[:3] == SHOPS.schema.types


def test_row_groups_and_files_are_bounded(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    options = {"rows_per_group": 300, "rows_per_file": 1_000, "compression": "snappy"}
    ended(sink(parquet=f"{folder}/", **options), *many(2_500))
    files = sorted(folder.iterdir())
    assert [one.name[:11] for one in files] == [f"part-0000{number}-" for number in range(3)]
    found = [pq.ParquetFile(one).metadata for one in files]
    groups = [[one.row_group(i).num_rows for i in range(one.num_row_groups)] for one in found]
    assert groups == [[300, 300, 300, 100], [300, 300, 300, 100], [300, 200]]
    assert found[0].row_group(0).column(0).compression == "SNAPPY"
    assert [one["user"] for one in rows_of(folder)] == [f"user-{number}" for number in range(2_500)]


def test_a_row_group_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "GROUP_BYTES", 1 << 20)
    monkeypatch.setattr("nightjar.pipeline.tables.sinks.batches.MOST_BYTES", 1 << 18)
    ended(sink(parquet=str(tmp_path / "out.parquet")), *many(3_000, text="x" * 1_000))
    found = pq.ParquetFile(tmp_path / "out.parquet").metadata
    assert found.num_row_groups == 3


def partitioned(count: int) -> Iterator[ResultRecord]:
    for index in range(count):
        shop = ["서울 1/호", "a=b", ""][index % 3]
        id_ = json.dumps([shop, f"2026-11-{index % 5 + 1:02}", index], ensure_ascii=False)
        yield generated(index, id_, f"text {index}")


@pytest.mark.parametrize("most_open", [64, 2])
def test_partitions_are_read_back_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_open: int
) -> None:
    monkeypatch.setattr(parquet, "MOST_OPEN", most_open)
    monkeypatch.setattr("nightjar.pipeline.tables.sinks.batches.MOST_ROWS", 40)
    folder = tmp_path / "out"
    opened = sink(keys=SHOPS, parquet=f"{folder}/", partition_by=["shop", "day"])
    assert ended(opened, *partitioned(300)).succeeded == 300
    found = ds.dataset(folder, partitioning="hive").to_table().to_pylist()
    rows = {(one["shop"], str(one["day"]), one["id"], one["text"]) for one in found}
    assert len(rows) == 300
    assert ("서울 1/호", "2026-11-01", 0, "text 0") in rows
    assert ("a=b", "2026-11-02", 1, "text 1") in rows
    assert (None, "2026-11-03", 2, "text 2") in rows  # as Hive names an empty text
    files = list(folder.rglob("*.parquet"))
    assert len(files) == (15 if most_open == 64 else 15 * 8)


def test_too_many_partitions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MOST_PARTITIONS", 10)
    opened = sink(keys=SHOPS, parquet=f"{tmp_path}/out/", partition_by=["day", "shop"])
    with pytest.raises(SinkWriteError, match="more than 10 folders"):
        opened.write(partitioned(300))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["out.jsonl", "out.parquet", "out/"])
def test_a_run_without_rows_makes_an_empty_table(tmp_path: Path, target: str) -> None:
    config = {"jsonl" if "jsonl" in target else "parquet": f"{tmp_path}/{target}"}
    assert ended(sink(**config)) == SinkCounts(0, 0)
    ended(sink(**config), generated(0, "a", "x"))
    assert ended(sink(**config)) == SinkCounts(0, 0)
    if "parquet" in config:
        assert ds.dataset(tmp_path / target).to_table().schema.names[:2] == ["user", "text"]
        assert ds.dataset(tmp_path / target).count_rows() == 0


def test_a_lone_surrogate_is_replaced(tmp_path: Path) -> None:
    answer = generated(0, "a", "x")
    assert answer.body is not None
    answer.body["choices"][0]["text"] = "bad \ud800 end"
    ended(sink(parquet=f"{tmp_path}/o.parquet"), record(0, "a", answer))
    assert pq.read_table(tmp_path / "o.parquet")["text"].to_pylist() == ["bad ? end"]
