"""The API's memory does not grow with an upload or a download, however long it is."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from nightjar.jobs.store import Store
from tests.api_process import Api, running_api

FEW, MANY = 4_000, 30_000  # rows of 3 KiB
TEXT = "x" * 3_000


def lines(count: int) -> Iterator[bytes]:
    """Batch lines that are refused at once, so that each has an outcome without any worker."""
    for number in range(count):
        body = {"prompt": f"{number} {TEXT}", "max_tokens": 0}
        row = {"custom_id": f"{number}-{TEXT[:50]}", "method": "POST", "url": "/v1/completions"}
        yield json.dumps({**row, "body": body}).encode() + b"\n"


def peak_bytes(api: Api, count: int) -> int:
    """The most memory that the API's processes held while they took and gave back so many rows."""
    folders = [Path(f"/proc/{process.pid}") for process in (api.process, api.upload_process())]
    for folder in folders:
        (folder / "clear_refs").write_text("5")  # forget the peak so far
    with httpx.Client(base_url=api.url, timeout=120) as client:
        headers = {"content-type": "application/jsonl"}
        job = client.post("/v1/jobs", content=lines(count), headers=headers).json()
        assert job["rejected"] == count
        with client.stream("GET", f"/v1/jobs/{job['id']}/errors") as answer:
            received = sum(1 for _ in answer.iter_lines())
        assert received == count
    peaks = [
        int(line.split()[1])
        for folder in folders
        for line in (folder / "status").read_text().splitlines()
        if line.startswith("VmHWM:")
    ]
    assert len(peaks) == len(folders)
    return sum(peaks) * 1024


@pytest.mark.slow
def test_memory_does_not_grow_with_an_upload_or_a_download(
    store: Store, database_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    sent = sum(map(len, lines(MANY)))
    allowed = {"NIGHTJAR_MAX_REJECTED_LINES": str(MANY)}
    with running_api(database_url, tiny_model, tmp_path, **allowed) as api:
        few = max(peak_bytes(api, FEW) for _ in range(2))
        many = peak_bytes(api, MANY)
    assert many - few < sent / 8, f"{sent >> 20} MiB sent, {(many - few) >> 20} MiB more held"
