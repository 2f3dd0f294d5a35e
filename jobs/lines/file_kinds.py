"""Which file was sent in the place of batch lines, from its first bytes, and how to mend it."""

HEAD_BYTES = 4096
"""So many first bytes are enough for `other_format`."""

_LINE = '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "..."}}'
_ROWS = f"write each of its rows as one JSON object a line: {_LINE}"
_TABLE = f"{_ROWS}; or write a task file, with which `nightjar run` reads it"
_UTF16 = "save it as UTF-8: iconv -f UTF-16 -t UTF-8 FILE > FILE.jsonl"

# First bytes, what has them, what to do.
_MAGIC = (
    (b"PAR1", "a Parquet file", _TABLE),
    (b"ARROW1", "an Arrow file", _ROWS),
    (b"\xff\xff\xff\xff", "an Arrow stream", _ROWS),
    (b"FEA1", "a Feather file", _ROWS),
    (b"ORC", "an ORC file", _ROWS),
    (b"Obj\x01", "an Avro file", _ROWS),
    (b"SQLite format 3\x00", "a SQLite database", _TABLE),
    (b"\x89HDF\r\n", "an HDF5 file", _ROWS),
    (b"\x93NUMPY", "a NumPy file", _ROWS),
    (b"%PDF", "a PDF file", _ROWS),
    (b"\x1f\x8b", "compressed with gzip", "unpack it: gunzip -c FILE > FILE.jsonl"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unpack it: zstd -dc FILE > FILE.jsonl"),
    (b"BZh", "compressed with bzip2", "unpack it: bunzip2 -c FILE > FILE.jsonl"),
    (b"\xfd7zXZ\x00", "compressed with xz", "unpack it: xz -dc FILE > FILE.jsonl"),
    (b"\x04\x22\x4d\x18", "compressed with lz4", "unpack it: lz4 -dc FILE > FILE.jsonl"),
    (b"PK\x03\x04", "a zip archive (or an Excel file)", f"unpack it; of a table, {_ROWS}"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it: 7z x FILE"),
    # Before UTF-16, whose mark begins UTF-32's.
    (b"\xff\xfe\x00\x00", "in UTF-32", _UTF16.replace("16", "32")),
    (b"\x00\x00\xfe\xff", "in UTF-32", _UTF16.replace("16", "32")),
    (b"\xff\xfe", "in UTF-16", _UTF16),
    (b"\xfe\xff", "in UTF-16", _UTF16),
)
_TAR_MARK = (257, b"ustar")
_PICKLE = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
_SEPARATORS = b",\t;|"


def other_format(head: bytes) -> str | None:
    """What a file is that begins with these bytes, and how to mend it; None for batch lines.

    A first line that is merely broken is no other format: a bad line costs that line alone.
    """
    for mark, kind, mend in _MAGIC:
        if head.startswith(mark):
            return f"is {kind}, not batch lines; {mend}"
    at, mark = _TAR_MARK
    if head[at : at + len(mark)] == mark:
        return "is a tar archive, not batch lines; unpack it: tar -xf FILE"
    if head.startswith(_PICKLE):
        return f"is a Python pickle, not batch lines; {_ROWS}"
    if _every_other_is_zero(head):
        return f"is in UTF-16, not batch lines; {_UTF16}"
    return _other_text(head.removeprefix(b"\xef\xbb\xbf").lstrip())


def _every_other_is_zero(head: bytes) -> bool:
    """Whether these are ASCII characters in UTF-16 without a mark."""
    first = head[:64]
    halves = first[::2], first[1::2]
    return len(first) >= 4 and any(
        not any(zeros) and all(letters) for zeros, letters in (halves, halves[::-1])
    )


def _other_text(text: bytes) -> str | None:
    lines = text.split(b"\n")
    first = lines[0].strip()
    if first.startswith(b"[") and first[1:].lstrip()[:1] in (b"", b"{"):
        return "is one JSON array, not batch lines; write its items one a line: jq -c '.[]' FILE"
    if first == b"{":
        return (
            "holds JSON objects over several lines, not batch lines; write each on one line: "
            "jq -c . FILE"
        )
    if first.startswith((b"<?xml", b"<!DOCTYPE", b"<!doctype", b"<html")):
        return f"is XML or HTML, not batch lines; {_ROWS}"
    # A table: several lines of which none is an object, and a separator in the first.
    objects = any(line.lstrip().startswith((b"{", b"[")) for line in lines)
    if len(lines) > 2 and not objects and any(mark in first for mark in _SEPARATORS):
        return f"is a table (CSV or the like), not batch lines; {_TABLE}"
    return None
