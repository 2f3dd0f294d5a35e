"""Files: lines in, lines out, and never half a file under the final name."""

import io
import json
import os
from pathlib import Path

import pytest

from nightjar.jobs.records import NewRequest, RejectedRow, RequestError, ResultRecord
from nightjar.pipeline.files.formats import (
    UnusableInputError,
    failure_text,
    read_batch_lines,
    replaced_when_whole,
    write_results,
)

GOOD = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}'


def record(index: int, error: RequestError | None = None) -> ResultRecord:
    body = None if error else {"text": "한글 \u2028 🙂"}
    return ResultRecord(
        id=index,
        index=index,
        line=index + 1,
        custom_id=f"row-{index}",
        status_code=400 if error else 200,
        body=body,
        error=error,
        prompt_tokens=1,
        completion_tokens=1,
        requested_tokens=1,
        saved_tokens=0,
        finish_reason=None,
    )


def test_lines_keep_their_numbers_and_blank_ones_are_passed_over() -> None:
    stream = io.BytesIO(b"\n" + GOOD + b"\r\n   \n{\n" + GOOD.replace(b'"a"', b'"b"'))
    rows = list(read_batch_lines(stream))
    assert [(type(row), row.line, row.index) for row in rows] == [
        (NewRequest, 2, 0),
        (RejectedRow, 4, 1),
        (NewRequest, 5, 2),
    ]


def test_a_line_without_end_is_refused_without_being_kept() -> None:
    endless = io.BytesIO(b"x" * (6 << 20) + b"\n" + GOOD)
    refused, good = read_batch_lines(endless)
    assert isinstance(refused, RejectedRow)
    assert refused.code == "line_too_long"
    assert isinstance(good, NewRequest)


def test_only_bad_lines_in_a_row_end_the_reading() -> None:
    scattered = (b"{\n" * 4 + GOOD + b"\n") * 3
    assert len(list(read_batch_lines(io.BytesIO(scattered), 5))) == 15
    with pytest.raises(
        UnusableInputError, match=r"5 lines in a row.*the first: line 16: is broken"
    ):
        list(read_batch_lines(io.BytesIO(scattered + b"{\n" * 5), 5))


def test_results_are_one_json_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    failure = RequestError("invalid_value", "no", "body.prompt")
    assert write_results(path, [record(0), record(1, failure)]) == 2
    lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    assert lines[0]["response"]["body"]["text"] == "한글 \u2028 🙂"
    assert lines[0]["error"] is None
    assert lines[1]["error"] is None
    told = lines[1]["response"]["body"]["error"]
    assert (told["param"], told["line"]) == ("body.prompt", 2)
    assert failure_text(lines[1]) == "line 2: no"


def test_a_broken_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old")

    def write_half() -> None:
        with replaced_when_whole(path) as stream:
            stream.write(b"half")
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_half()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("out.jsonl", "old")]


def test_a_file_is_as_open_as_the_users_mask_says(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        for name in ("first", "second"):
            write_results(tmp_path / name, [])
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
