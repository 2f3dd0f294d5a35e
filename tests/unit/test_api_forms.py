"""Forms that arrive in pieces: the same in any pieces, bounded, and refused in clear words."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.file_uploads import parse_life, safe_filename
from nightjar.jobs.api.forms import MAX_FIELD_BYTES, MAX_PARTS, UploadForm

BOUNDARY = "b"
KIND = f"multipart/form-data; boundary={BOUNDARY}"
KNOWN = ("purpose", "note")
# Looks like the boundary, again and again.
CONTENT = b"\r\n--bx\r\n-\r\r\n--\r\n--b\r-\r\n--b-\r\n--\xea\xb0\x80\x00" * 3


def part(name: str, value: bytes, more: str = "") -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + value + b"\r\n"


def whole(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


FILE = part("file", CONTENT, '; filename="in.jsonl"\r\nContent-Type: application/jsonl')
PURPOSE = part("purpose", b"batch")


def parse(body: bytes, *cuts: int) -> tuple[UploadForm, bytes]:
    """The form and its file; the body arrives cut at these places."""
    form, taken = UploadForm(KIND, KNOWN), b""
    edges = sorted({0, len(body), *(cut % len(body) for cut in cuts)})
    for start, end in pairwise(edges):
        form.feed(body[start:end])
        taken += form.take(7)
    form.check_complete()
    return form, taken + form.take(len(form.data))


@given(st.lists(st.integers(0, 500)), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_form_is_the_same_in_any_pieces(cuts: list[int], file_first: bool) -> None:
    form, content = parse(whole(*((FILE, PURPOSE) if file_first else (PURPOSE, FILE))), *cuts)
    assert (form.fields, form.filename, content) == ({"purpose": "batch"}, "in.jsonl", CONTENT)
    assert not form.data


def refusal(body: bytes) -> RefusedRequestError:
    with pytest.raises(RefusedRequestError) as caught:
        parse(body)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "code", "param", "says"),
    [
        (b"no form at all", "invalid_form", None, "is no multipart form"),
        (b'{"purpose": "batch"}', "invalid_form", None, "is no multipart form"),
        (b"--c\r\n\r\n--c--\r\n", "invalid_form", None, "its boundary is not the one"),
        (b"\r\n\r\n", "invalid_form", None, "ends before its closing boundary"),
        (FILE + PURPOSE, "invalid_form", None, "ends before its closing boundary"),
        (FILE[:-20], "invalid_form", None, "ends before its closing boundary"),
        (whole(PURPOSE), "missing_field", "file", "lacks the field 'file'"),
        (whole(b""), "missing_field", "file", "lacks the field 'file'"),
        (whole(FILE, FILE), "repeated_field", "file", "has the field 'file' twice"),
        (whole(PURPOSE, PURPOSE, FILE), "repeated_field", "purpose", "twice"),
        (whole(FILE, part("porpoise", b"batch")), "unknown_field", "porpoise", "known are file, p"),
        (whole(part("note", b"x" * (MAX_FIELD_BYTES + 1))), "field_too_long", "note", "1024 bytes"),
        (whole(part("note", b"\xff")), "invalid_value", "note", "is not UTF-8"),
        (b"--b\r\nContent-Type: text/plain\r\n\r\n", "invalid_form", None, "without a name"),
        (b"--b\r\nX: " + b"y" * 5_000, "invalid_form", None, "is no multipart form"),
        (b"--b\r\n" + b"X: y\r\n" * 9, "invalid_form", None, "is no multipart form"),
        (
            whole(part("file", b"AA==", "\r\nContent-Transfer-Encoding: base64")),
            "unsupported_encoding",
            "file",
            "send its bytes as they are",
        ),
    ],
)
def test_what_is_no_such_form_is_refused(
    body: bytes, code: str, param: str | None, says: str
) -> None:
    error = refusal(body)
    assert (error.code, error.param) == (code, param)
    assert says in str(error)


def test_a_form_has_so_many_fields_at_most() -> None:
    names = tuple(f"n{number}" for number in range(MAX_PARTS + 1))
    form = UploadForm(KIND, names)
    with pytest.raises(RefusedRequestError, match="more than 8 fields") as caught:
        form.feed(b"".join(part(name, b"1") for name in names))
    assert caught.value.code == "too_many_fields"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("", 415),
        ("application/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/mixed; boundary=b", 415),
        ("multipart/form-data", 400),
        ("multipart/form-data; boundary=", 400),
        (f"multipart/form-data; boundary={'x' * 71}", 400),
        ("multipart/form-data; boundary=\xe9", 400),
    ],
)
def test_the_content_type_is_that_of_a_form(kind: str, status: int) -> None:
    with pytest.raises(RefusedRequestError) as caught:
        UploadForm(kind, KNOWN)
    assert (caught.value.status, caught.value.param) == (status, "Content-Type")


@pytest.mark.parametrize(
    ("given", "safe"),
    [
        ("in.jsonl", "in.jsonl"),
        ("밤.jsonl", "밤.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("C:\\files\\in.jsonl", "in.jsonl"),
        ("a\r\nSet-Cookie: b\x00\x1b[2J\x7f", "aSet-Cookie: b[2J"),
        ("exe\u202elnosj.\u2028", "exelnosj."),
        ("", "upload"),
        ("..", "upload"),
        ("a/", "upload"),
        (" \t ", "upload"),
        ("x" * 300 + ".jsonl", "x" * 249 + ".jsonl"),
        ("." + "x" * 300, "." + "x" * 254),
    ],
)
def test_names_are_stored_safely(given: str, safe: str) -> None:
    assert safe_filename(given) == safe
    assert safe_filename(safe) == safe


def life(anchor: str | None, seconds: str | None) -> float:
    given = {"expires_after[anchor]": anchor, "expires_after[seconds]": seconds}
    return parse_life({name: value for name, value in given.items() if value is not None}, 7.0)


def test_a_life() -> None:
    assert life(None, None) == 7
    assert life("created_at", "3600") == 3_600
    assert life("created_at", "2592000") == 2_592_000


@pytest.mark.parametrize(
    ("anchor", "seconds", "param"),
    [
        (None, "3600", "anchor"),
        ("last_active_at", "3600", "anchor"),
        ("created_at", None, "seconds"),
        *(
            ("created_at", seconds, "seconds")
            for seconds in ("", "3599", "2592001", "-3600", "3600.5", "1e4", "²", "9" * 900)
        ),
    ],
)
def test_a_bad_life(anchor: str | None, seconds: str | None, param: str) -> None:
    with pytest.raises(RefusedRequestError) as caught:
        life(anchor, seconds)
    assert caught.value.param == f"expires_after[{param}]"
    assert caught.value.code == "invalid_expires_after"
