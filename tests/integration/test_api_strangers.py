"""A hostile stranger at a real `nightjar api`: raw bytes on real sockets.

Whatever is sent is refused, in the shape of OpenAI's errors, at once and in bounded memory.
"""

import gzip
import json
import select
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from nightjar.jobs.store import Store
from tests.api_process import Api, running_api
from tests.raw_http import connect, exchange, form, raw_request, read_answers

KEY = "the-operators-own-secret-of-40-letters!!"
BEARER = f"Authorization: Bearer {KEY}"
PLANTED = "a planted prompt that nobody may log"
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}}\n'
FORM, LINES = "multipart/form-data; boundary=b", "application/jsonl"
FILES, JOBS, BATCHES, HOOKS = "/v1/files", "/v1/jobs", "/v1/batches", "/v1/webhooks"
TEXT, CHAT, RERANK = "/v1/completions", "/v1/chat/completions", "/rerank"
PURPOSE = (b'Content-Disposition: form-data; name="purpose"', b"batch")
FILE = (b'Content-Disposition: form-data; name="file"; filename="in.jsonl"', LINE)
CHUNKED = "Transfer-Encoding: chunked"
BOMB_BYTES = 64 << 20
MOST_GROWTH = 100 << 20


@dataclass(frozen=True)
class Place:
    """An API with its database and its log."""

    api: Api
    store: Store
    log: Path


@contextmanager
def opened(url: str, model: Path, folder: Path) -> Iterator[Place]:
    given = {
        "NIGHTJAR_API_KEY": KEY,
        "NIGHTJAR_MODEL_NAME": "tiny",
        "NIGHTJAR_UPLOAD_STALLED_AFTER_S": "1",
        "NIGHTJAR_MAX_UPLOAD_BYTES": str(16 << 20),
    }
    with closing(Store(url)) as store:
        store.migrate()
        with running_api(url, model, folder, **given) as api:
            api.upload_process()
            yield Place(api, store, folder / "api.log")


@pytest.fixture(scope="module")
def place(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("api")
    with opened(f"sqlite:///{folder / 'nightjar.db'}", tiny_model, folder) as place:
        yield place


def batch(**fields: object) -> bytes:
    given = {"input_file_id": "file-1", "endpoint": TEXT, "completion_window": "24h"}
    return json.dumps(given | fields).encode()


def refused_body(path: str, body: bytes, kind: str = "application/json", *more: str) -> bytes:
    return raw_request(path, body, kind=kind, headers=[BEARER, *more])


def chunked(path: str, body: bytes, kind: str, *more: str) -> bytes:
    return raw_request(path, body, kind=kind, headers=[BEARER, CHUNKED, *more], length=None)


def upload(*parts: tuple[bytes, bytes]) -> bytes:
    return refused_body(FILES, form(parts), FORM)


DEEP = b"[" * 100_000 + b"]" * 100_000
BROKEN_HTTP = {
    "two lengths": raw_request(BATCHES, b"{}", headers=[BEARER, "Content-Length: 3"]),
    "a length below zero": raw_request(BATCHES, headers=["Content-Length: -1"], length=None),
    "a length of 40 digits": raw_request(
        FILES, headers=[f"Content-Length: {'9' * 40}"], length=None
    ),
    "an encoded transfer": raw_request(
        BATCHES, b"0\r\n\r\n", headers=["Transfer-Encoding: gzip, chunked"], length=None
    ),
    "a chunk that is longer than said": chunked(BATCHES, b"1\r\n{}\r\n0\r\n\r\n", LINES),
    "a chunk of no number": chunked(FILES, b"zz\r\n{}\r\n0\r\n\r\n", FORM),
    "a chunk with a long name": chunked(JOBS, b"2;" + b"a" * 300_000 + b"\r\n{}\r\n", LINES),
    "no host": b"GET /v1/jobs HTTP/1.1\r\n\r\n",
    "two hosts": raw_request(JOBS, method="GET", headers=["Host: evil"]),
    "a null byte in a header": raw_request(JOBS, method="GET", headers=["X: a\0b"]),
    "headers of a megabyte": raw_request(JOBS, method="GET", headers=["X: " + "a" * (1 << 20)]),
    "a boundary of a megabyte": raw_request(FILES, kind=f"{FORM}{'b' * (1 << 20)}"),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n",
}
# What is sent, the status, and the code of the error.
REFUSED: dict[str, tuple[bytes, int, str]] = {
    **{f"broken HTTP: {name}": (sent, 400, "invalid_http") for name, sent in BROKEN_HTTP.items()},
    **{
        f"two lengths in two ways at {path}": (
            raw_request(path, b"2\r\n{}\r\n0\r\n\r\n", kind=kind, headers=[BEARER, CHUNKED]),
            400,
            "ambiguous_length",
        )
        for path, kind in ((FILES, FORM), (JOBS, LINES), (BATCHES, "application/json"))
    },
    **{
        f"{encoding} at {path}": (
            refused_body(path, data, kind, f"Content-Encoding: {encoding}"),
            415,
            "unsupported_encoding",
        )
        for encoding, data in {
            "gzip": gzip.compress(bytes(BOMB_BYTES)),
            "deflate": zlib.compress(bytes(BOMB_BYTES)),
            "zstd": b"\x28\xb5\x2f\xfd" + bytes(99),
            "br": b"\x81" * 999,
        }.items()
        for path, kind in {
            FILES: FORM,
            JOBS: LINES,
            BATCHES: "application/json",
            HOOKS: "application/json",
            TEXT: "application/json",
            RERANK: "application/json",
        }.items()
    },
    "two keys": (
        raw_request(JOBS, method="GET", headers=[BEARER, f"{BEARER}x"]),
        400,
        "several_api_keys",
    ),
    "two types of content": (
        refused_body(FILES, form([PURPOSE, FILE]), FORM, "Content-Type: text/plain"),
        400,
        "repeated_header",
    ),
    "two encodings of content": (
        refused_body(
            BATCHES,
            b"{}",
            "application/json",
            "Content-Encoding: identity",
            "Content-Encoding: gzip",
        ),
        400,
        "repeated_header",
    ),
    "two idempotency keys": (
        refused_body(JOBS, LINE, LINES, "Idempotency-Key: a", "Idempotency-Key: b"),
        400,
        "repeated_header",
    ),
    "an unheard-of length of a form": (
        raw_request(FILES, b"--b", kind=FORM, headers=[BEARER], length=9_999_999_999_999_999_999),
        413,
        "upload_too_large",
    ),
    "an unheard-of length of a job": (
        raw_request(JOBS, LINE, kind=LINES, headers=[BEARER], length=9_999_999_999_999_999_999),
        413,
        "upload_too_large",
    ),
    "an unheard-of length of a batch": (
        raw_request(BATCHES, b"{}", headers=[BEARER], length=9_999_999_999_999_999_999),
        413,
        "body_too_large",
    ),
    "an endless chunk": (chunked(FILES, b"ffffffffffffffff\r\n--b", FORM), 408, "upload_stalled"),
    "a form that never comes": (
        raw_request(FILES, kind=FORM, headers=[BEARER, "Expect: 100-continue"], length=500),
        408,
        "upload_stalled",
    ),
    "a batch that never comes": (
        raw_request(BATCHES, b"{", headers=[BEARER], length=500),
        408,
        "upload_stalled",
    ),
    "a webhook of a megabyte": (refused_body(HOOKS, b" " * (1 << 20)), 413, "body_too_large"),
    "ten thousand fields": (
        upload(*[(b'Content-Disposition: form-data; name="x%d"' % n, b"y") for n in range(10_000)]),
        400,
        "unknown_field",
    ),
    "ten thousand purposes": (upload(*[PURPOSE] * 10_000), 400, "repeated_field"),
    "a field of ten thousand headers": (
        upload((b"X: y\r\n" * 10_000 + PURPOSE[0], PURPOSE[1]), FILE),
        400,
        "invalid_form",
    ),
    "a filename of a megabyte": (
        upload(PURPOSE, (FILE[0][:-1] + b"a" * (1 << 20) + b'"', LINE)),
        400,
        "invalid_form",
    ),
    "a boundary of 10,000 characters": (
        refused_body(FILES, b"", f"multipart/form-data; boundary={'b' * 10_000}"),
        400,
        "invalid_form",
    ),
    "deep messages": (refused_body(CHAT, b'{"messages": ' + DEEP + b"}"), 400, "invalid_json"),
    "deep metadata": (refused_body(BATCHES, b'{"metadata": ' + DEEP + b"}"), 400, "invalid_json"),
    "a deep webhook": (refused_body(HOOKS, b'{"url": ' + DEEP[:9_000]), 400, "invalid_body"),
    "a billion texts": (
        refused_body(TEXT, b'{"prompt": "a", "n": 1000000000}'),
        400,
        "invalid_value",
    ),
    "an infinite number": (
        refused_body(TEXT, b'{"prompt": "a", "n": 1e999}'),
        400,
        "invalid_value",
    ),
    "no number": (refused_body(TEXT, b'{"prompt": "a", "top_p": NaN}'), 400, "invalid_json"),
    "no number in a batch": (
        refused_body(BATCHES, b'{"metadata": {"a": NaN}}'),
        400,
        "invalid_json",
    ),
    "a number past 64 bits": (
        refused_body(RERANK, b'{"query": "a", "documents": ["b"], "top_n": 1%b}' % (b"0" * 30)),
        400,
        "invalid_value",
    ),
    "100,000 documents": (
        refused_body(RERANK, json.dumps({"query": "a", "documents": ["b"] * 100_000}).encode()),
        400,
        "invalid_value",
    ),
    "half a character": (refused_body(TEXT, b'{"prompt": "\\ud800"}'), 400, "invalid_encoding"),
    "half a character in a name": (
        refused_body(BATCHES, b'{"\\ud800": 1, "endpoint": "a", "input_file_id": "b"}'),
        400,
        "invalid_value",
    ),
    "not UTF-8": (refused_body(BATCHES, b'{"endpoint": "\xff"}'), 400, "invalid_encoding"),
    "10,001 pairs of metadata": (
        refused_body(BATCHES, batch(metadata={str(n): "v" for n in range(10_001)})),
        400,
        "invalid_metadata",
    ),
    "a file that is none": (refused_body(BATCHES, batch(input_file_id="%00")), 404, "unknown_file"),
    "a webhook to this machine": (
        refused_body(HOOKS, b'{"url": "https://127.0.0.1/"}'),
        400,
        "invalid_webhook_url",
    ),
    "a webhook to a name of this machine": (
        refused_body(HOOKS, b'{"url": "https://localhost/"}'),
        400,
        "invalid_webhook_url",
    ),
    "a key in the address": (
        raw_request(f"{JOBS}?key={KEY}", method="GET", headers=[BEARER]),
        400,
        "api_key_in_query",
    ),
    **{
        f"{path}?limit={limit}": (
            raw_request(f"{path}?limit={limit}", method="GET", headers=[BEARER]),
            400,
            "invalid_parameter",
        )
        for path in (FILES, JOBS, BATCHES, HOOKS)
        for limit in ("-1", "0", "1e999", "NaN", "9" * 5_000)
    },
    **{
        f"{path}?after={after[:9]}": (
            raw_request(f"{path}?after={after}", method="GET", headers=[BEARER]),
            400,
            "invalid_after" if path in (FILES, BATCHES) else "invalid_parameter",
        )
        for path in (FILES, JOBS, BATCHES, HOOKS)
        for after in ("%00", "%ED%A0%80", "a" * 10_000, "msg_of_another_list")
    },
    **{
        f"{method} {path.format(id_[:9])}": (
            raw_request(path.format(id_), method=method, headers=[BEARER]),
            404,
            code,
        )
        for method, path, code in (
            ("GET", f"{FILES}/{{}}", "unknown_file"),
            ("GET", f"{FILES}/{{}}/content", "unknown_file"),
            ("DELETE", f"{FILES}/{{}}", "unknown_file"),
            ("GET", f"{BATCHES}/{{}}", "unknown_batch"),
            ("POST", f"{BATCHES}/{{}}/cancel", "unknown_batch"),
            ("GET", f"{JOBS}/{{}}/output", "unknown_job"),
            ("GET", f"{HOOKS}/{{}}/deliveries", "unknown_webhook"),
        )
        for id_ in ("%00", "a%00b", "%ED%A0%80", "%ff", "a" * 10_000, "'--")
    },
}


@pytest.fixture(scope="module")
def peak_before(place: Place) -> int:
    assert httpx.get(f"{place.api.url}/health").status_code == 200
    return peak_bytes(place)


def peak_bytes(place: Place) -> int:
    """The most memory that either process has held."""
    processes = [psutil.Process(place.api.process.pid), place.api.upload_process()]
    status = [Path(f"/proc/{process.pid}/status").read_text() for process in processes]
    lines = [line for text in status for line in text.splitlines() if line.startswith("VmHWM:")]
    return max(int(line.split()[1]) for line in lines) * 1024


def check_refusal(place: Place, name: str) -> None:
    sent, status, code = REFUSED[name]
    began = time.monotonic()
    *_, answer = exchange(place.api.url, sent)
    took_s = time.monotonic() - began
    assert (answer.status, answer.error()["code"]) == (status, code), answer.body[:500]
    assert len(answer.body) < 2_000  # whatever the length of what was sent
    assert took_s < 10


@pytest.mark.parametrize("name", REFUSED)
def test_a_stranger_is_refused_in_openai_s_shape(place: Place, peak_before: int, name: str) -> None:
    check_refusal(place, name)
    assert peak_bytes(place) - peak_before < MOST_GROWTH


@pytest.mark.slow
def test_what_a_database_is_asked_is_refused_by_postgresql_too(
    tiny_model: Path, tmp_path: Path, postgres_tables: str
) -> None:
    asked = [name for name in REFUSED if "after=" in name or f" {FILES}/" in name]
    assert len(asked) > 20
    with opened(postgres_tables, tiny_model, tmp_path) as place:
        for name in asked:
            check_refusal(place, name)


def test_many_requests_on_one_connection_are_answered_in_turn(place: Place) -> None:
    good = raw_request(JOBS, method="GET", kind=None, headers=[BEARER])
    bad = raw_request(TEXT, b"{", headers=[BEARER])
    stays = [one.replace(b"Connection: close\r\n", b"") for one in (good, bad)]
    answers = exchange(place.api.url, b"".join(stays) * 10 + good)
    assert [answer.status for answer in answers] == [200, 400] * 10 + [200]


def test_what_follows_an_unclear_length_is_no_request(place: Place) -> None:
    hidden = raw_request(JOBS, method="GET", headers=[BEARER])
    unclear = raw_request(BATCHES, b"0\r\n\r\n" + hidden, headers=[BEARER, CHUNKED])
    answers = exchange(place.api.url, unclear.replace(b"Connection: close\r\n", b""))
    assert [answer.status for answer in answers] == [400]


def test_a_byte_now_and_then_is_too_slow_on_every_route(place: Place) -> None:
    """None of them ever stalls."""

    def trickle(path: str, kind: str) -> tuple[int, str]:
        with connect(place.api.url) as connection:
            connection.sendall(raw_request(path, kind=kind, headers=[BEARER], length=10_000))
            for byte in b"--b {".ljust(200):
                if select.select([connection], [], [], 0.1)[0]:
                    break
                connection.sendall(bytes([byte]))
            *_, answer = read_answers(connection)
        return answer.status, str(answer.error()["code"])

    routes = {FILES: FORM, JOBS: LINES, BATCHES: "application/json", TEXT: "application/json"}
    with ThreadPoolExecutor(len(routes)) as pool:
        told = list(pool.map(trickle, routes, routes.values()))
    assert told == [(408, "upload_too_slow")] * len(routes)


def test_a_refusal_comes_before_the_rest_of_an_upload(place: Place) -> None:
    """The upload process refuses it, and the API relays that at once."""
    body = form([(PURPOSE[0], b"wrong"), (FILE[0], LINE * 100_000)])
    head = raw_request(FILES, kind=FORM, headers=[BEARER], length=len(body))
    with connect(place.api.url) as connection:
        with suppress(ConnectionError):  # as httpx: the answer may come while it still sends
            connection.sendall(head + body[: len(body) // 2])
        # Later it would be 408: the upload stalls.
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"../../etc/passwd", "passwd"),
        (b"..\\..\\boot.ini", "boot.ini"),
        (b"a\0b", "ab"),
        (b"<img src=x onerror=alert(1)>", "<img src=x onerror=alert(1)>"),
        (b"..", "upload"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        ("\u202etxt.exe".encode(), "txt.exe"),
        (b"%0d%0aSet-Cookie: a=b", "%0d%0aSet-Cookie: a=b"),
    ],
)
def test_a_filename_does_no_harm(place: Place, given: bytes, kept: str) -> None:
    disposition = b'Content-Disposition: form-data; name="file"; filename="%b"' % given
    *_, made = exchange(place.api.url, upload(PURPOSE, (disposition, LINE)))
    assert made.status == 200, made.body
    shown = json.loads(made.body)
    assert shown["filename"] == kept
    with httpx.Client(base_url=place.api.url, headers={"Authorization": f"Bearer {KEY}"}) as http:
        content = http.get(f"/v1/files/{shown['id']}/content")
        assert content.content == LINE
        assert content.headers["content-disposition"].startswith("attachment; ")
        assert content.headers["x-content-type-options"] == "nosniff"
        assert "set-cookie" not in content.headers
        assert http.delete(f"/v1/files/{shown['id']}").status_code == 200


def test_half_an_upload_leaves_nothing(place: Place) -> None:
    body = form([PURPOSE, FILE])
    sent = raw_request(FILES, body[:-20], kind=FORM, headers=[BEARER], length=len(body))
    exchange(place.api.url, sent, shut=True)
    assert place.store.files.newest(10, "default") == []


def test_headers_need_not_be_ascii(place: Place) -> None:
    sent = refused_body(JOBS, b"PAR1", f"{LINES}; x=\xff", "Idempotency-Key: \xff")
    *_, answer = exchange(place.api.url, sent)
    assert (answer.status, answer.error()["code"]) == (400, "not_batch_lines")


def test_another_protocol_is_answered_as_http(place: Place) -> None:
    upgrade = ["Upgrade: websocket", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", BEARER]
    sent = raw_request(JOBS, method="GET", headers=[*upgrade, "Sec-WebSocket-Version: 13"])
    with connect(place.api.url) as connection:
        connection.sendall(sent.replace(b"Connection: close", b"Connection: Upgrade, close"))
        *_, answer = read_answers(connection)
    assert answer.status == 200


def test_nothing_is_left_behind_and_no_secret_is_logged(place: Place) -> None:
    """The last test of each API."""
    for path in (TEXT, CHAT, RERANK, BATCHES, HOOKS, JOBS, FILES):
        for body in (
            f'{{"prompt": "{PLANTED}", "{PLANTED}": 1}}',
            f'{{"{PLANTED}',
            f'["{PLANTED}"]',
            f'{{"model": "{PLANTED}", "url": "{PLANTED}", "messages": "{PLANTED}"}}',
        ):
            kind = LINES if path == JOBS else "application/json"
            sent = refused_body(path, body.encode(), kind)
            *_, answer = exchange(place.api.url, sent)
            assert answer.status in (400, 404, 415) or path == JOBS, answer.body
    exchange(place.api.url, f"{KEY} {PLANTED}\r\n\r\n".encode())
    log = place.log.read_text(encoding="utf-8")
    assert "Uvicorn running" in log
    for planted in (KEY, PLANTED, PLANTED.replace(" ", "%20")):
        assert planted not in log
    assert "internal_error" not in log
    assert "Exception in ASGI" not in log
    assert place.store.files.newest(10, "default") == []
    assert place.store.batches.newest(10, "default") == []
    assert place.store.webhooks.newest("default", 10, None) == []
    assert httpx.get(f"{place.api.url}/health").status_code == 200
