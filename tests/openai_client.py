"""The official `openai` client against a whole system with an API."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
from openai.types import Batch

from tests.faults.api import answers_http, give_api
from tests.faults.system import HASTE, System, running_system
from tests.processes import wait_until
from tests.services import free_port

OVER = {"completed", "failed", "expired", "cancelled"}
QUICK = HASTE | {"NIGHTJAR_MICRO_BATCH_REQUESTS": "8", "NIGHTJAR_FAKE_STEP_S": "0.01"}


@contextmanager
def openai_system(
    folder: Path, database_url: str, model: Path, environment: dict[str, str] = QUICK
) -> Iterator[tuple[System, openai.OpenAI]]:
    """A running system with an API that answers, and a client of it that retries as it does."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    prepare = partial(give_api, port)
    with (
        running_system(
            folder, database_url, model, environment=environment, prepare=prepare
        ) as system,
        openai.OpenAI(api_key="none", base_url=f"{url}/v1") as client,
    ):
        wait_until("the API", lambda: answers_http(url))
        yield system, client


def wait_over(client: openai.OpenAI, batch_id: str, patience_s: float = 120.0) -> Batch:
    """Poll, as the client's users do, until the batch has its last status."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            found = client.batches.retrieve(batch_id)
        except openai.APIConnectionError:
            found = None  # the API is away
        if found is not None and found.status in OVER:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def read_file(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a result file."""
    assert file_id is not None
    content = client.files.content(file_id).content
    assert client.files.retrieve(file_id).bytes == len(content)
    return [json.loads(line) for line in content.splitlines()]
