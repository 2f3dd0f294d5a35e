"""`nightjar submit task.toml`: rows of a table through a deployment into a table."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from nightjar import Client
from nightjar.jobs.api import create_app
from nightjar.jobs.lines.batch_lines import BatchReader
from nightjar.jobs.records import NewRequest, NewResult, RejectedRow
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.pipeline.front.cli import app
from nightjar.pipeline.front.task_submit import batch_line
from tests.api_process import listening
from tests.tasks import rendered, write_rows, write_task

SINK = 'parquet = "answers.parquet"'


@pytest.fixture(scope="module")
def api_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An API, and a thread that answers in the place of a planner and a GPU worker."""
    folder = tmp_path_factory.mktemp("system")
    url = f"sqlite:///{folder / 'nightjar.db'}"
    store, over = Store(url), threading.Event()
    store.migrate()
    answering = threading.Thread(target=answer, args=(store, over))
    served = create_app(store, lambda job_id: None, served_model="tiny")
    with listening(served) as address:
        answering.start()
        yield address
        over.set()
        answering.join()
    store.close()


def answer(store: Store, over: threading.Event) -> None:
    """Answer whatever waits, until the tests are over."""
    choice = {"index": 0, "text": "an answer", "finish_reason": "stop"}
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    body = {"choices": [choice], "model": "tiny", "usage": usage}
    while not over.wait(0.1):
        for job_id in store.backlog.jobs_to_plan():
            waiting = store.backlog.queued_requests(job_id, 100)
            known = [NewResult(one.id, 200, body) for one in waiting]
            store.planning.save_plan(job_id, [], [], answered=known)


def task_of(folder: Path, model: str, more: str = "", **task: Any) -> Path:
    sink = f"[parameters]\nmax_tokens = 4\n{more}\n[sink]\n{SINK}"
    path = write_task(folder, more=sink, **task)
    path.write_text(f'model = "{model}"\n{path.read_text(encoding="utf-8")}', encoding="utf-8")
    return path


def answers(folder: Path) -> list[dict[str, Any]]:
    return sorted(pq.read_table(folder / "answers.parquet").to_pylist(), key=lambda row: row["id"])


def test_answers_come_beside_the_keys_and_a_second_night_is_another_job(
    api_url: str, tmp_path: Path
) -> None:
    def submit(*more: str) -> Result:
        return CliRunner().invoke(app, ["submit", str(task), "--api", api_url, *more])

    write_rows(tmp_path, {"id": [1, 2, 3, 1], "review": ["a", None, "c", "d"]})
    task = task_of(tmp_path, "tiny")
    first = submit("--json")
    assert first.exit_code == 0, first.stderr
    job = json.loads(first.stdout)
    assert (job["counts"]["total"], job["rejected"]) == (4, 2)
    assert "line 2, column 'review': is null" in first.stderr
    assert not (tmp_path / "answers.parquet").exists()

    # Killed after the rows were sent, and before the answer: the key finds the job.
    note = tmp_path / "task.toml.work" / "submitted.json"
    note.write_text(json.dumps(json.loads(note.read_bytes()) | {"job_id": None}))
    sending = note.with_name("sending")
    sending.write_text("not a folder")
    told = submit()
    assert (told.exit_code, "sending: Not a directory; run" in told.stderr) == (1, True)
    sending.unlink()
    sending.mkdir()
    (sending / "rows.jsonl").write_text("rows of the killed command")
    again = submit("--json")
    assert (again.exit_code, json.loads(again.stdout)["id"]) == (0, job["id"])
    assert not sending.exists()

    kept = task.read_text(encoding="utf-8")
    task.write_text(kept.replace("{review}", "{review}!"), encoding="utf-8")
    refused = submit("--watch")
    assert refused.exit_code == 2
    assert f"{job['id']}) are not written yet, and the task's request has changed" in refused.stderr
    task.write_text(kept, encoding="utf-8")

    done = submit("--watch")
    assert done.exit_code == 3, done.stderr
    assert json.loads(done.stdout)["id"] == job["id"]
    assert "2 rows succeeded, 2 failed" in done.stderr
    assert "without 1 rows that have no key" in done.stderr
    rows = answers(tmp_path)
    assert [(row["id"], row["error_code"]) for row in rows] == [
        (1, None),
        (2, "invalid_row"),
        (3, None),
    ]
    assert rows[1]["error_message"] == "line 2, column 'review': " + (
        "is null; give it a value in [request.defaults]"
    )
    assert rows[0]["text"]
    assert rows[0]["model"] == "tiny"

    write_rows(tmp_path, {"id": [7], "review": ["e"]})
    done = submit("--watch", "--json")
    assert done.exit_code == 0, done.stderr
    *_, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert last["id"] != job["id"]
    assert [row["id"] for row in answers(tmp_path)] == [7]


def test_a_model_directory_gives_its_name_and_its_tokenizer(
    api_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    write_rows(tmp_path, {"id": [1], "review": ["far too long " * 500]})
    (tmp_path / "tiny").symlink_to(tiny_model)
    request = 'prompt = "{review}"\ncrop = {column = "review", tokens = "context"}'
    task = task_of(tmp_path, "tiny", request=request)
    done = CliRunner().invoke(app, ["submit", str(task), "--watch", "--api", api_url])
    assert done.exit_code == 0, done.stderr
    (tmp_path / "tiny").unlink()
    refused = CliRunner().invoke(app, ["submit", str(task), "--api", api_url])
    assert refused.exit_code == 2
    assert "crop: tokens need the model's directory" in refused.stderr


def test_a_job_that_is_gone_is_told(api_url: str, tmp_path: Path) -> None:
    write_rows(tmp_path, {"id": [1], "review": ["a"]})
    task = task_of(tmp_path, "tiny")
    assert CliRunner().invoke(app, ["submit", str(task), "--api", api_url]).exit_code == 0
    note = tmp_path / "task.toml.work" / "submitted.json"
    noted = json.loads(note.read_bytes())
    with Client(api_url) as client:
        assert client.job(noted["job_id"]).wait(timeout=60).succeeded
    note.write_text(json.dumps(noted | {"job_id": "job_none"}))
    done = CliRunner().invoke(app, ["submit", str(task), "--watch", "--api", api_url])
    assert done.exit_code == 1
    assert "remove" in done.stderr
    assert "submitted.json" in done.stderr


def test_what_cannot_be_submitted(api_url: str, tmp_path: Path) -> None:
    def refused(*more: str) -> str:
        done = CliRunner().invoke(app, ["submit", str(task), "--api", api_url, *more])
        assert done.exit_code == 2, done.output
        return done.stderr

    task = write_task(tmp_path)
    assert "has no [sink]" in refused()
    assert "--key" in refused("--key", "k")
    write_rows(tmp_path, {"id": pa.array([], pa.int64()), "review": pa.array([], pa.string())})
    task = task_of(tmp_path, "tiny")
    assert "has no rows" in refused()


def test_every_kind_of_request_is_read_back_as_it_was(tmp_path: Path) -> None:
    columns = {"id": [1, 2], "review": ["a", "b"], "items": [["x", "y"], []]}
    write_rows(tmp_path, columns)
    drawn = "[parameters]\nlogprobs = 2\nseed = 3\nstop = ['.']"
    chat = 'messages = [{role = "user", content = "{review}"}]'
    rank = 'query = "{review}"\ndocuments = {column = "items"}'
    for kind, request, more in (
        ("generate", 'prompt = "{review}"', drawn),
        ("chat", chat, "[parameters]\nlogprobs = true\ntop_logprobs = 2"),
        ("rank", rank, "[parameters]\ntop_n = 1"),
        ("score", 'prompt = "{review}"\ntext = " ok"', ""),
    ):
        rows = rendered(write_task(tmp_path, request, kind=kind, more=more))
        reader = BatchReader()
        sent = b"".join(batch_line(row, is_chat=kind == "chat") for row in rows)
        assert reader.rows(sent) == rows, kind
        first = rows[0]
        assert isinstance(first, NewRequest)
        assert first.kind is (
            RequestKind.RANK if kind in ("rank", "score") else RequestKind.GENERATE
        )


def test_a_line_that_says_why_it_is_no_request() -> None:
    row = RejectedRow(0, 1, None, "invalid_row", "line 1: is \x00null", None)
    (read,) = BatchReader().rows(batch_line(row, is_chat=False))
    assert read == RejectedRow(0, 1, None, "invalid_row", "line 1: is null", None)
    for error in ("null", '{"code": "No Code", "message": "x"}', '{"code": "a", "message": ""}'):
        (read,) = BatchReader().rows(f'{{"custom_id": "a", "error": {error}}}\n'.encode())
        assert isinstance(read, RejectedRow)
        assert (read.code, read.custom_id) == ("invalid_value", "a")
        assert "line 1, error: must have a code and a message" in read.message
