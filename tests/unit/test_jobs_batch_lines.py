"""Cutting uploads into lines, and the lines of output."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightjar.jobs.lines.batch_lines import (
    PIECE_BYTES,
    BatchReader,
    LineCutter,
    json_lines,
    json_pieces,
    line_error,
    output_line,
)
from nightjar.jobs.records import NewRequest, RejectedRow, RequestError, ResultRecord

GOOD = json.dumps(
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}
).encode()


def cut(chunks: list[bytes], max_bytes: int = 1_000) -> list[tuple[int, bytes]]:
    cutter = LineCutter(max_bytes)
    lines = [line for chunk in chunks for line in cutter.cut(chunk)]
    return [*lines, *cutter.end()]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"", []),
        (b"a\nb\n", [(1, b"a"), (2, b"b")]),
        (b"a\nb", [(1, b"a"), (2, b"b")]),
        (b"a\r\n\r\n \nb", [(1, b"a"), (4, b"b")]),
        (b"\xef\xbb\xbf\r\na\n", [(2, b"a")]),
        (b"\xef\xbb\xbf", []),
        (b"\n\xef\xbb\xbf\n", [(2, b"\xef\xbb\xbf")]),
    ],
)
def test_lines(text: bytes, lines: list[tuple[int, bytes]]) -> None:
    assert cut([text]) == lines


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r\n", b" ", b"de\nf"]), max_size=12))
def test_it_does_not_matter_where_the_chunks_end(chunks: list[bytes]) -> None:
    assert cut(chunks) == cut([b"".join(chunks)])


def test_a_long_line_is_cut_off_and_the_next_one_is_whole() -> None:
    assert cut([b"x" * 30] * 10 + [b"\nnext"], max_bytes=20) == [(1, b"x" * 21), (2, b"next")]


def test_a_long_line_within_a_chunk_is_cut_off_too() -> None:
    chunk = b"a\n" + b"x" * 21 + b"\n" + b"y" * 300 + b"\nnext\n"
    lines = [(1, b"a"), (2, b"x" * 21), (3, b"y" * 21), (4, b"next")]
    assert cut([chunk], max_bytes=20) == lines


def test_rows_are_numbered_through_the_upload() -> None:
    reader = BatchReader(max_line_bytes=200)
    rows = reader.rows(GOOD[:20]) + reader.rows(GOOD[20:] + b"\n\nbroken\n" + b"y" * 300)
    rows += reader.rows(b"y\n" + GOOD) + reader.last_rows()
    assert [(row.index, row.line) for row in rows] == [(0, 1), (1, 3), (2, 4), (3, 5)]
    assert [type(row) for row in rows] == [NewRequest, RejectedRow, RejectedRow, NewRequest]
    assert isinstance(rows[2], RejectedRow)
    assert rows[2].code == "line_too_long"


def test_a_byte_order_mark_alone_is_no_row() -> None:
    reader = BatchReader()
    rows = reader.rows(b"\xef\xbb\xbf\n" + GOOD) + reader.last_rows()
    assert [(type(row), row.index, row.line) for row in rows] == [(NewRequest, 0, 2)]


def test_a_line_with_another_url_is_refused_where_one_alone_is_allowed() -> None:
    assert isinstance(BatchReader(only_url="/v1/completions").rows(GOOD + b"\n")[0], NewRequest)
    (row,) = BatchReader(only_url="/v1/rerank").rows(GOOD + b"\n")
    assert isinstance(row, RejectedRow)
    assert (row.code, row.param, row.custom_id) == ("url_mismatch", "url", "a")
    assert row.message.startswith("line 1, url: is /v1/completions, not the batch's endpoint")


def record(error: RequestError | None) -> ResultRecord:
    body = None if error else {"choices": []}
    return ResultRecord(
        5, 2, 3, "row", 200 if error is None else 400, body, error, 1, 2, 3, 1, "stop"
    )


def test_the_line_of_a_success() -> None:
    assert output_line(record(None)) == {
        "id": "batch_req_000000000005",
        "custom_id": "row",
        "response": {
            "status_code": 200,
            "request_id": "req_000000000005",
            "body": {"choices": []},
        },
        "error": None,
    }


def test_the_line_of_a_failure_has_it_where_openai_has_it() -> None:
    line = output_line(record(RequestError("invalid_value", "line 3: no", "body.stop")))
    assert line["error"] is None
    assert line["response"] == {
        "status_code": 400,
        "request_id": "req_000000000005",
        "body": {
            "error": {
                "message": "line 3: no",
                "type": "invalid_request_error",
                "param": "body.stop",
                "code": "invalid_value",
                "line": 3,
            }
        },
    }
    assert line_error(line) == line["response"]["body"]["error"]


@pytest.mark.parametrize("code", ["cancelled", "expired"])
def test_only_a_row_that_was_not_computed_has_an_error_and_no_response(code: str) -> None:
    line = output_line(record(RequestError(code, "the job ended", None)))
    assert line["response"] is None
    assert line["error"] == {"code": f"batch_{code}", "message": "the job ended"}
    assert line_error(line) == line["error"]


def test_a_success_has_no_error_and_lines_of_the_version_before_are_read() -> None:
    assert line_error(output_line(record(None))) is None
    told = {"code": "invalid_value", "message": "no", "param": None, "line": 3}
    assert line_error({"response": None, "error": told}) == told


@pytest.mark.parametrize("count", [0, 1, 5_000])
def test_pieces_are_whole_lines_of_a_bounded_size(count: int) -> None:
    records = [record(None)] * count
    lines, pieces = list(json_lines(records)), list(json_pieces(records))
    assert b"".join(pieces) == b"".join(lines)
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert all(len(piece) >= PIECE_BYTES for piece in pieces[:-1])
    assert all(len(piece) < PIECE_BYTES + len(lines[0]) for piece in pieces)
