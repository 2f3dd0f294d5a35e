"""A batch of the official `openai` client, while each process of the system is killed.

The client polls as its users do. Its batch ends with every row once, with the answer that an
undisturbed batch of the same rows has.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.faults.api import API
from tests.faults.conftest import Note
from tests.faults.oracle import Verdict, most_in_flight, recomputed
from tests.faults.rows import batch_file
from tests.faults.system import BROKER, HASTE, PLANNER, STEADY, System
from tests.openai_client import openai_system, read_file, wait_over
from tests.processes import find_children

ROWS = 160
WORKER = "worker-0"
UPLOADS = "nightjar.pipeline.front.api_server"
# So that an upload, and the reading of its file, last long enough to be killed in the middle.
BLANK_LINES = b"\n" * (12 << 20)


def created(client: openai.OpenAI, file_id: str) -> openai.types.Batch:
    return client.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
    )


def answers(client: openai.OpenAI, batch: openai.types.Batch) -> list[tuple[str, Any]]:
    """What each row was told, by custom id, without what tells batches apart."""
    assert (batch.status, batch.error_file_id) == ("completed", None)
    found = []
    for line in read_file(client, batch.output_file_id):
        body = line["response"]["body"]
        said = (body.get("results") or body.get("choices"), body["usage"])
        found.append((line["custom_id"], said))
    return found


def judge(system: System, undisturbed: dict[str, Any], found: list[tuple[str, Any]]) -> Verdict:
    """What became of the rows of the last batch."""
    system.jobs[:] = [system.store.jobs.newest(1)[0].id]
    rows = dict(found)
    wrong = sum(undisturbed[custom_id] != said for custom_id, said in found)
    twice = len(found) - len(rows)
    return Verdict(ROWS, ROWS - len(rows), twice, wrong, recomputed(system))


def kill_uploads(system: System) -> None:
    """Kill the process that takes uploads; the API starts another."""
    for process in find_children(system.pid(API), UPLOADS):
        process.kill()


def completed(system: System, batch_id: str) -> int:
    job = system.store.batches.get(batch_id, "default").job
    return 0 if job is None else job.completed


def upload_with_a_kill(system: System, client: openai.OpenAI) -> str:
    """The file of a batch, although the process that takes it is killed in the middle."""
    content = BLANK_LINES + batch_file(ROWS)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(client.files.create, file=("in.jsonl", content), purpose="batch")
        system.wait_until("half an upload", lambda: half_uploaded(system) or sent.done())
        assert not sent.done()
        kill_uploads(system)
        return sent.result().id


def half_uploaded(system: System) -> bool:
    return any(counter > 1 for _, counter in system.store.file_sweeping.uploading())


def kill_while_it_is_read(system: System, batch_id: str) -> None:
    """Kill the planner while it reads the batch's file."""
    job_id = batch_id.replace("batch_", "job_")
    attempts = system.store.batch_work.count_reading
    system.wait_until("the reading", lambda: attempts(job_id, 0) > 0)
    system.kill(PLANNER)
    assert system.store.batches.get(batch_id, "default").job is None
    system.start(PLANNER)


STRIKES: list[tuple[str, Callable[[System], object]]] = [
    ("worker", lambda system: system.restart(WORKER)),
    ("planner", lambda system: system.restart(PLANNER)),
    ("API", lambda system: system.restart(API)),
    ("uploads", kill_uploads),
    ("broker", lambda system: system.restart(BROKER)),
]


def poll_while_killed(system: System, client: openai.OpenAI, file_id: str) -> openai.types.Batch:
    """The batch that a client polls, while one process after the other is killed."""
    batch = created(client, file_id)
    kill_while_it_is_read(system, batch.id)
    with ThreadPoolExecutor(1) as pool:
        polled = pool.submit(wait_over, client, batch.id, 400.0)
        for number, (name, strike) in enumerate(STRIKES):
            least = 1 + number * ROWS // (2 * len(STRIKES))
            system.wait_until(
                f"rows before the {name} is killed",
                lambda least=least: completed(system, batch.id) >= least,
            )
            assert not polled.done(), f"the batch was over before the {name} was killed"
            strike(system)
        system.wait_until("the end of the polling", polled.done)
        return polled.result()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_polling_ends_with_every_row_once_whatever_is_killed(
    database_url: str, tiny_model: Path, tmp_path: Path, note: Note
) -> None:
    environment = HASTE | STEADY | {"NIGHTJAR_FAKE_STEP_S": "0.15"}
    with openai_system(tmp_path, database_url, tiny_model, environment) as (system, client):
        plain = client.files.create(file=("in.jsonl", batch_file(ROWS)), purpose="batch").id
        undisturbed = dict(answers(client, wait_over(client, created(client, plain).id)))
        assert len(undisturbed) == ROWS
        file_id = upload_with_a_kill(system, client)
        batch = poll_while_killed(system, client, file_id)
        verdict = judge(system, undisturbed, answers(client, batch))
        note(
            28,
            "each process SIGKILL in the middle of a batch of the openai client",
            len(STRIKES) + 2,
            verdict,
            note="two of them while the file is uploaded and read; the client's polling ended",
        )
        verdict.check(most_in_flight(system))
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (ROWS, ROWS, 0)
        assert not system.restarted
        assert len(system.store.jobs.newest()) == 2
