"""The API's memory does not grow with an upload or a download, however long it is."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from nightjar.jobs.store import Store
from nightjar.pipeline.embedded.processes import Service
from tests.processes import NIGHTJAR, wait_until
from tests.services import free_port

FEW, MANY = 4_000, 30_000  # rows of half a KiB
TEXT = "x" * 400


def lines(count: int) -> Iterator[bytes]:
    """Batch lines that are refused at once, so that each has an outcome without any worker."""
    for number in range(count):
        body = {"prompt": f"{number} {TEXT}", "max_tokens": 0}
        row = {"custom_id": f"{number}-{TEXT[:50]}", "method": "POST", "url": "/v1/completions"}
        yield json.dumps({**row, "body": body}).encode() + b"\n"


@pytest.fixture
def api(database_url: str, tiny_model: Path, tmp_path: Path) -> Iterator[tuple[str, int]]:
    store = Store(database_url)
    store.migrate()
    store.close()
    port = free_port()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NIGHTJAR_")} | {
        "NIGHTJAR_DATABASE_URL": database_url,
        "NIGHTJAR_BROKER_URL": "redis://127.0.0.1:1/0",  # nobody there: a warning, no more
        "NIGHTJAR_MODEL": str(tiny_model),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [*NIGHTJAR, "api", f"--port={port}"]
    service = Service("api", command, tmp_path / "api.log", environment, tmp_path)
    service.start()
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until("the API", lambda: answers(url))
        assert service.process is not None
        yield url, service.process.pid
    finally:
        service.stop(10)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def peak_bytes(pid: int, url: str, count: int) -> int:
    """The most memory that the API held while it took and gave back a job of so many rows."""
    folder = Path(f"/proc/{pid}")
    (folder / "clear_refs").write_text("5")  # forget the peak so far
    with httpx.Client(base_url=url, timeout=120) as client:
        headers = {"content-type": "application/jsonl"}
        job = client.post("/v1/jobs", content=lines(count), headers=headers).json()
        assert job["rejected"] == count
        with client.stream("GET", f"/v1/jobs/{job['id']}/errors") as answer:
            received = sum(1 for _ in answer.iter_lines())
        assert received == count
    (peak,) = [
        int(line.split()[1])
        for line in (folder / "status").read_text().splitlines()
        if line.startswith("VmHWM:")
    ]
    return peak * 1024


def test_memory_does_not_grow_with_an_upload_or_a_download(api: tuple[str, int]) -> None:
    url, pid = api
    sent = sum(map(len, lines(MANY)))
    few = max(peak_bytes(pid, url, FEW) for _ in range(2))
    many = peak_bytes(pid, url, MANY)
    assert many - few < sent / 3, f"{sent >> 20} MiB sent, {(many - few) >> 20} MiB more held"
