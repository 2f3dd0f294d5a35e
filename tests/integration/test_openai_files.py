"""Files by the official `openai` client, with both processes of a real `nightjar api`."""

import hashlib
import http.client
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest

from nightjar.jobs.file_records import PART_BYTES
from nightjar.jobs.records import DEFAULT_TENANT
from nightjar.jobs.store import Store
from tests.api_process import Api, running_api, upload_sockets
from tests.processes import wait_until

MAX_BYTES = 40 * PART_BYTES
LINE = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"p"}}\n'


@pytest.fixture(scope="module")
def place(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Api, Store]]:
    folder = tmp_path_factory.mktemp("api")
    url = f"sqlite:///{folder / 'nightjar.db'}"
    limits = {"NIGHTJAR_MODEL_NAME": "tiny", "NIGHTJAR_MAX_UPLOAD_BYTES": str(MAX_BYTES)}
    with closing(Store(url)) as store:
        store.migrate()
        with running_api(url, tiny_model, folder, **limits) as api:
            yield api, store


@pytest.fixture
def client(place: tuple[Api, Store]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key="none", base_url=f"{place[0].url}/v1", max_retries=0) as opened:
        yield opened
        for each in opened.files.list():
            opened.files.delete(each.id)


def create(client: openai.OpenAI, content: bytes = LINE) -> openai.types.FileObject:
    return client.files.create(file=("in.jsonl", content), purpose="batch")


def test_a_file_goes_in_and_out(client: openai.OpenAI, tmp_path: Path) -> None:
    content = LINE * (3 * PART_BYTES // len(LINE))
    path = tmp_path / "밤.jsonl"
    path.write_bytes(content)
    made = client.files.create(
        file=path, purpose="batch", expires_after={"anchor": "created_at", "seconds": 7_200}
    )
    assert (made.object, made.purpose, made.status) == ("file", "batch", "processed")
    assert (made.filename, made.bytes) == ("밤.jsonl", len(content))
    assert made.expires_at == made.created_at + 7_200
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == content
    with client.files.with_streaming_response.content(made.id) as response:
        digest = hashlib.sha256(b"".join(response.iter_bytes())).hexdigest()
    assert digest == hashlib.sha256(content).hexdigest()
    deleted = client.files.delete(made.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (made.id, "file", True)
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(made.id)
        assert (caught.value.code, caught.value.type) == ("unknown_file", "not_found_error")


def test_memory_does_not_grow_with_a_file(client: openai.OpenAI, place: tuple[Api, Store]) -> None:
    """1 GB was measured by hand: the peak of each process is that of a small file, 120 MiB."""
    processes = [place[0].process.pid, place[0].upload_process().pid]
    content = LINE * (32 * PART_BYTES // len(LINE))

    def peaks(size: int) -> list[int]:
        made = create(client, content[:size])
        with client.files.with_streaming_response.content(made.id) as response:
            assert sum(len(piece) for piece in response.iter_bytes()) == size
        return [_peak_bytes(pid) for pid in processes]

    before = peaks(3 * PART_BYTES)
    after = peaks(len(content))
    grown = [end - begin for begin, end in zip(before, after, strict=True)]
    assert max(grown) < len(content) / 2


def _peak_bytes(pid: int) -> int:
    """The most memory that a process has held."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    (peak,) = [line for line in lines if line.startswith("VmHWM:")]
    return int(peak.split()[1]) * 1024


def test_its_pager_lists_every_file_once(client: openai.OpenAI) -> None:
    made = [create(client).id for _ in range(7)]
    pages = list(client.files.list(limit=3).iter_pages())
    assert [len(page.data) for page in pages] == [3, 3, 1]
    listed = [each.id for each in client.files.list(limit=3)]
    assert sorted(listed) == sorted(made)
    assert [each.id for each in client.files.list(limit=2, order="asc")] == listed[::-1]
    assert [each.id for each in client.files.list(purpose="batch_output")] == []


def test_a_client_may_delete_what_it_lists(client: openai.OpenAI) -> None:
    made = {create(client).id for _ in range(5)}
    deleted = {client.files.delete(each.id).id for each in client.files.list(limit=2)}
    assert deleted == made
    assert list(client.files.list()) == []


def test_errors_are_the_client_s_own(client: openai.OpenAI, place: tuple[Api, Store]) -> None:
    with pytest.raises(openai.BadRequestError, match="upload with the purpose 'batch'") as bad:
        client.files.create(file=("in.jsonl", LINE), purpose="fine-tune")
    assert (bad.value.param, bad.value.code) == ("purpose", "invalid_purpose")
    with pytest.raises(openai.BadRequestError, match="is empty"):
        create(client, b"")
    with pytest.raises(openai.APIStatusError, match=f"longer than {MAX_BYTES} bytes") as large:
        create(client, LINE * (MAX_BYTES // len(LINE) + 1))
    assert large.value.status_code == 413
    with pytest.raises(openai.BadRequestError) as foreign:
        client.files.list(after="file-of-somebody-else")
    assert foreign.value.param == "after"
    with pytest.raises(openai.BadRequestError) as limit:
        client.files.list(limit=-1)
    assert limit.value.param == "limit"
    assert list(client.files.list()) == []


def test_a_refusal_reaches_a_sender_who_is_not_done(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="a Parquet file"):
        create(client, b"PAR1" + bytes(7 * PART_BYTES))


def half_sent(api: Api) -> socket.socket:
    """A connection on which half of a form has been sent."""
    parts = urlsplit(api.url)
    connection = socket.create_connection((parts.hostname, parts.port))
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: here\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        f"Content-Length: {6 * PART_BYTES}\r\n\r\n"
        '--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    )
    connection.sendall(head.encode() + LINE * (3 * PART_BYTES // len(LINE)))
    return connection


def test_a_connection_that_breaks_leaves_no_file(place: tuple[Api, Store]) -> None:
    api, store = place
    connection = half_sent(api)
    wait_until("a part to be stored", lambda: store.files.stored_bytes(DEFAULT_TENANT))
    connection.close()
    wait_until("the upload to be given up", lambda: not store.file_sweeping.uploading())
    wait_until("its end", lambda: upload_sockets(api.upload_process()) == 1)
    assert store.files.newest(10, DEFAULT_TENANT) == []
    assert store.file_sweeping.sweep_files() >= 1
    assert store.files.stored_bytes(DEFAULT_TENANT) == 0


@pytest.mark.slow
def test_an_upload_whose_process_is_killed_is_refused_and_swept(
    place: tuple[Api, Store], client: openai.OpenAI
) -> None:
    api, store = place
    with half_sent(api) as connection:
        wait_until("a part to be stored", lambda: store.files.stored_bytes(DEFAULT_TENANT))
        api.upload_process().send_signal(signal.SIGKILL)
        connection.sendall(LINE * (2 * PART_BYTES // len(LINE)))
        response = http.client.HTTPResponse(connection)
        response.begin()
        told = response.read().decode()
    assert (response.status, "send it again" in told) == (503, True)
    assert "Idempotency-Key" not in told
    ((file_id, counter),) = store.file_sweeping.uploading()
    assert store.file_sweeping.take_back(file_id, counter)  # as the sweeper does in a while
    assert store.file_sweeping.sweep_files() >= 1
    assert create(client).bytes == len(LINE)
