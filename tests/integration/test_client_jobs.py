"""The Python client against a whole system of processes: from Python's rows to results and back."""

import asyncio
import json
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from examples.nightly import make_data, with_client
from nightjar import (
    AsyncClient,
    Chat,
    Client,
    Generate,
    JobStatus,
    Rank,
    UnfinishedError,
    WaitTimeoutError,
)
from nightjar.pipeline.front.cli import app
from tests.faults.api import answers_http, give_api
from tests.faults.system import HASTE, running_system
from tests.processes import start_nightjar, wait_until
from tests.services import free_port
from tests.tasks import write_rows, write_task

QUICK = HASTE | {"NIGHTJAR_MICRO_BATCH_REQUESTS": "8", "NIGHTJAR_FAKE_STEP_S": "0.01"}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def api_url(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("system"), free_port()
    model = shutil.copytree(tiny_model, folder / "model")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    database_url = f"sqlite:///{folder / 'nightjar.db'}"
    with running_system(
        folder, database_url, model, environment=QUICK, prepare=partial(give_api, port)
    ):
        url = f"http://127.0.0.1:{port}"
        wait_until("the API", lambda: answers_http(url))
        yield url


def test_from_typed_requests_to_typed_results(api_url: str) -> None:
    requests: list[Generate | Chat | Rank | dict[str, str]] = [
        Generate(prompt="hello", max_tokens=4, n=2, temperature=0.5, custom_id="two"),
        Chat(messages=HELLO, max_tokens=4),
        Rank(query="hello", documents=[" blue", " sky", " sea"], top_n=2),
        {"prompt": ""},
    ]
    seen: list[JobStatus] = []
    with Client(api_url) as client:
        job = client.submit(requests, priority=2, metadata={"night": "밤"})
        ended = job.wait(timeout=60, progress=seen.append)
        two, chat, rank, bad = job.results()
        failure = job.first_failure()
        listed = next(client.jobs())
        (model,) = client.models()
    assert (ended.state, ended.is_over, ended.succeeded) == ("completed_with_failures", True, False)
    assert (ended.priority, ended.metadata, ended.ended) == (2, {"night": "밤"}, 4)
    assert seen[-1] == ended == listed
    assert two.custom_id == "two"
    assert two.text == two.texts[0]
    assert len(two.texts) == 2
    assert (chat.custom_id, chat.error) == ("row-1", None)
    assert chat.text is not None
    assert chat.usage is not None
    assert chat.usage.completion_tokens > 0
    assert rank.ranking is not None
    assert rank.scores is not None
    assert len(rank.ranking) == 2
    best = rank.scores[rank.ranking[0]]
    assert best == max(score for score in rank.scores if score is not None)
    assert bad.error is not None
    assert (bad.error.code, bad.error.line, bad.text) == ("invalid_value", 4, None)
    assert failure == bad
    assert (model.served, model.workers) == (True, 1)


def test_from_a_frame_to_a_frame(api_url: str) -> None:
    frame = pl.DataFrame({"product": [f"p{n}" for n in range(50)], "review": ["좋다", None] * 25})
    with Client(api_url) as client:
        job = client.submit(
            frame, template="리뷰: {review}\n", id_column="product", fields={"max_tokens": 3}
        )
        job.wait(timeout=60, progress=True)
        found, as_pandas = job.to_polars(), job.to_pandas()
    assert found["custom_id"].to_list() == frame["product"].to_list()
    assert found["text"].is_null().to_list() == [False, True] * 25
    assert set(found["error_code"].drop_nulls()) == {"missing_field"}
    joined = frame.join(found, left_on="product", right_on="custom_id")
    assert joined.height == 50
    assert isinstance(as_pandas, pd.DataFrame)
    assert as_pandas["text"].isna().sum() == 25


def test_a_job_is_steered_and_waited_for(api_url: str) -> None:
    rows = (Generate(prompt=f"p{n}", max_tokens=60, ignore_eos=True) for n in range(400))
    with Client(api_url) as client:
        job = client.submit(rows)
        assert job.pause().state == "paused"
        with pytest.raises(WaitTimeoutError, match=r"paused after 0.3 s: .* of 400 rows"):
            job.wait(timeout=0.3)
        with pytest.raises(UnfinishedError, match="is paused"):
            job.to_arrow()
        job.resume()
        same = client.job(job.id)
        first = next(same.follow(every_s=0.05))
        assert first.text
        same.cancel()
        ended = job.wait(timeout=60)
        codes = [one.error.code for one in job.results("failed") if one.error is not None]
    assert ended.state == "cancelled"
    assert set(codes) == {"batch_cancelled"}
    assert len(codes) == ended.counts.cancelled > 0


def test_ctrl_c_ends_the_watching_and_not_the_job(api_url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Client(api_url) as client:
        job = client.submit(
            Generate(prompt=f"{n}", max_tokens=60, ignore_eos=True) for n in range(400)
        )
        job.pause()
        command = ["status", job.id, "--watch", "--json", "--api", api_url]
        watching = start_nightjar(*command, log=log)
        wait_until("a line", lambda: job.id in log.read_text())
        watching.send_signal(signal.SIGINT)
        wait_until("its end", lambda: "the job goes on" in log.read_text())
        watching.send_signal(signal.SIGINT)  # somebody is impatient
        assert watching.wait(30) == 130
        assert "the job goes on" in log.read_text()
        assert "Traceback" not in log.read_text()
        assert job.status().state == "paused"
        job.cancel()


def test_the_same_in_asyncio(api_url: str) -> None:
    async def one(client: AsyncClient, number: int) -> list[str | None]:
        rows = [Generate(prompt=f"{number} {n}", max_tokens=3) for n in range(20)]
        job = await client.submit(rows)
        landed = [result.custom_id async for result in job.follow(every_s=0.05)]
        ended = await job.wait(timeout=60)
        assert ended.succeeded
        table = await job.to_arrow()
        assert table.column("custom_id").to_pylist() == [f"row-{n}" for n in range(20)]
        assert sorted(landed, key=str) == sorted((f"row-{n}" for n in range(20)), key=str)
        return [result.text async for result in job.results()]

    async def steer(client: AsyncClient) -> str:
        job = await client.submit({"prompt": "a", "max_tokens": 3})
        for change in (job.pause, job.resume, job.cancel):
            await change()
        return (await job.wait(timeout=60)).state

    async def all_of_it() -> None:
        async with AsyncClient(api_url) as client:
            texts = await asyncio.gather(*(one(client, number) for number in range(4)))
            assert all(None not in some for some in texts)
            assert await steer(client) in {"cancelled", "completed"}
            assert [model.id for model in await client.models()] == ["tiny"]
            listed = [status.id async for status in client.jobs()]
            assert len(listed) == len(set(listed)) >= 5

    asyncio.run(all_of_it())


def test_commands_say_one_thing_on_stdout_for_programs(api_url: str, tmp_path: Path) -> None:
    def told(*arguments: str, code: int = 0) -> list[dict[str, object]]:
        done = CliRunner().invoke(app, [*arguments, "--json", "--api", api_url])
        assert done.exit_code == code, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]

    with Client(api_url) as client:
        mixed = client.submit([Generate(prompt="a", max_tokens=2), {"prompt": ""}]).id
        bad = client.submit([{"prompt": ""}]).id
    source = tmp_path / "in.jsonl"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    source.write_text(json.dumps({**line, "body": {"prompt": "a", "max_tokens": 2}}))
    (made,) = told("submit", str(source))
    *_, watched = told("status", str(made["id"]), "--watch")
    assert (watched["id"], watched["state"]) == (made["id"], "completed")
    assert told("status", mixed, "--watch", code=3)[-1]["state"] == "completed_with_failures"
    assert told("status", bad, "--watch", code=4)[-1]["state"] == "failed"
    (status,) = told("status", mixed)
    assert status["id"] == mixed
    assert [line["custom_id"] for line in told("results", mixed)] == ["row-0", "row-1"]
    assert [line["custom_id"] for line in told("results", mixed, "--outcome=failed")] == ["row-1"]
    for command in ("pause", "resume", "cancel", "retry"):
        assert [job["id"] for job in told(command, mixed)] == [mixed]
    assert [model["id"] for model in told("models")] == ["tiny"]
    assert told("status", "job_unknown", code=1) == []
    plain = CliRunner().invoke(app, ["status", mixed, "--watch", "--api", api_url])
    assert (plain.exit_code, json.loads(plain.stdout)["id"]) == (3, mixed)


def test_a_task_is_computed_by_a_deployment(api_url: str, tmp_path: Path) -> None:
    write_rows(tmp_path, {"id": [1, 2], "review": ["a", "b"]})
    sink = '[parameters]\nmax_tokens = 4\n[sink]\nparquet = "answers.parquet"'
    task = write_task(tmp_path, more=sink)
    arguments = ["submit", str(task), "--watch", "--model", "tiny", "--api", api_url]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    rows = pq.read_table(tmp_path / "answers.parquet").to_pylist()
    assert [row["id"] for row in rows] == [1, 2]
    assert all(row["text"] and row["error_code"] is None for row in rows)


@pytest.mark.slow
def test_rows_of_an_open_job_are_computed_before_it_is_sealed(api_url: str) -> None:
    with Client(api_url) as client, client.open() as job:
        job.append(Generate(prompt=f"early {n}", max_tokens=3) for n in range(3))
        job.flush()
        landing = job.follow(every_s=0.05)
        early = [next(landing).custom_id for _ in range(3)]
        assert job.status().open
        assert "append rows" in (job.status().waiting or "")
        job.append({"prompt": "late", "max_tokens": 3})
        job.seal()
        late = [result.custom_id for result in landing]
        ended = job.wait(timeout=60)
    assert (sorted(map(str, early)), late) == (["row-0", "row-1", "row-2"], ["row-3"])
    assert (ended.state, ended.open, ended.counts.total) == ("completed", False, 4)


@pytest.mark.slow
def test_a_pipeline_describes_its_products_by_the_client(
    api_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTJAR_API", api_url)
    products = make_data.make_products(1)[:5]
    make_data.write_shop(tmp_path / "shop.db", products, [])
    for _ in range(2):  # a retry of the same night
        assert with_client.describe(tmp_path, "2026-11-24") == 0
    with Client(api_url) as client:
        made = [job for job in client.jobs() if job.counts.total == 5]
    assert len(made) == 1
    with closing(sqlite3.connect(tmp_path / "shop.db")) as shop:
        rows = shop.execute("SELECT sku, text, error FROM described ORDER BY sku").fetchall()
    assert [row[0] for row in rows] == [product[0] for product in products]
    assert all(text and error is None for _, text, error in rows)
