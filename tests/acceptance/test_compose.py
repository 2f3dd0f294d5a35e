"""The deployment of docker-compose.yml, its commands run as local processes.

A real PostgreSQL, a real broker, the API, a planner, a GPU worker, the clock and Flower: what an
operator starts, what a client sends, and what both see when a part goes away.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from nightjar.jobs.lines.batch_lines import line_error
from nightjar.jobs.store.tables import worker as worker_table
from nightjar.pipeline.client import steps
from tests.databases import fresh_postgres_database
from tests.processes import (
    all_ended,
    completion_line,
    nightjar,
    nightjar_here,
    read_lines,
    rerank_line,
    wait_until,
    write_lines,
)
from tests.services import (
    VARIABLES,
    Deployment,
    end_abruptly,
    free_port,
    running_deployment,
)

Line = dict[str, Any] | str
OVER = {"completed", "completed_with_failures", "failed", "cancelled"}
AUTH = ("owl", "hoot")
KEY = {"Authorization": f"Bearer {VARIABLES['API_KEY']}"}


@pytest.fixture(scope="module")
def deployment(
    postgres_server: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Everything, started in the order that depends_on asks for."""
    directory = tmp_path_factory.mktemp("deployment")
    with (
        fresh_postgres_database(postgres_server) as url,
        running_deployment(directory, url, tiny_model) as running,
    ):
        running.start_in_order()
        running.wait_for_api()
        yield running


@pytest.fixture
def api(deployment: Deployment) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=deployment.api_url, headers=KEY, timeout=30) as client:
        yield client


def mixed_lines(count: int, prefix: str) -> list[Line]:
    """Three completions and a ranking, over and over."""
    return [
        completion_line(f"{prefix}-{n}", prompt=f"hello {n % 5}", max_tokens=6, ignore_eos=True)
        if n % 4
        else rerank_line(f"{prefix}-{n}", query="hello", documents=[f" {n}", " blue sky", " 하늘"])
        for n in range(count)
    ]


def long_lines(count: int, prefix: str, max_tokens: int = 60) -> list[Line]:
    """Completions that keep a GPU worker busy for some seconds."""
    return [
        completion_line(f"{prefix}-{n}", prompt=f"{n}", max_tokens=max_tokens, ignore_eos=True)
        for n in range(count)
    ]


def post(api: httpx.Client, lines: list[Line], **headers: str) -> httpx.Response:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    headers = {"Content-Type": "application/jsonl"} | headers
    return api.post("/v1/jobs", content="\n".join(texts), headers=headers)


def submit(api: httpx.Client, lines: list[Line]) -> str:
    answer = post(api, lines)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def job(api: httpx.Client, job_id: str) -> dict[str, Any]:
    answer = api.get(f"/v1/jobs/{job_id}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def wait_over(deployment: Deployment, api: httpx.Client, job_id: str) -> dict[str, Any]:
    """The job when it has ended; the logs when it does not."""

    def over() -> bool:
        deployment.restart_ended()
        return job(api, job_id)["state"] in OVER

    try:
        wait_until(f"the end of {job_id}", over, 60)
    except AssertionError as error:
        raise AssertionError(f"{error}: {job(api, job_id)}\n{deployment.logs()}") from None
    return job(api, job_id)


def landed(api: httpx.Client, job_id: str) -> int:
    return int(job(api, job_id)["counts"]["completed"])


def page_through(api: httpx.Client, job_id: str, limit: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    after = -1
    while True:
        query = {"after": after, "limit": limit}
        page = api.get(f"/v1/jobs/{job_id}/results", params=query).json()
        assert len(page["data"]) <= limit
        rows += page["data"]
        if not page["has_more"]:
            return rows
        after = page["next_after"]


def assert_each_once(api: httpx.Client, ended: dict[str, Any], prefix: str, tokens: int) -> None:
    """Every row of a long_lines job succeeded, and was counted, once."""
    total = ended["counts"]["total"]
    assert ended["state"] == "completed"
    ends = {"completed": total, "failed": 0, "cancelled": 0}
    assert ended["counts"] == {"total": total, **ends, "reused": 0}
    assert ended["usage"]["generated_tokens"] == total * tokens
    rows = page_through(api, ended["id"], 1000)
    assert [row["custom_id"] for row in rows] == [f"{prefix}-{n}" for n in range(total)]


def test_a_job_over_http(deployment: Deployment, api: httpx.Client) -> None:
    lines = mixed_lines(20, "row")
    lines.insert(16, '{"custom_id": "broken", ')
    lines.append(completion_line("too-long", prompt="a b c d " * 100))
    answer = post(api, lines, **{"Idempotency-Key": "night-1"})
    assert answer.status_code == 201, answer.text
    assert (answer.json()["accepted"], answer.json()["rejected"]) == (21, 1)
    assert answer.json()["warning"] is None
    job_id = answer.json()["id"]
    ended = wait_over(deployment, api, job_id)
    assert ended["state"] == "completed_with_failures"
    ends = {"completed": 20, "failed": 2, "cancelled": 0}
    # Of 15 completions 5 are different.
    assert ended["counts"] == {"total": 22, **ends, "reused": 10}
    assert ended["model"] == "demo"
    assert ended["micro_batches"]["done"] == sum(ended["micro_batches"].values()) >= 2

    rows = page_through(api, job_id, 5)
    names = [line["custom_id"] for line in mixed_lines(20, "row")]
    assert [row["custom_id"] for row in rows] == [*names[:16], None, *names[16:], "too-long"]
    check_answers({row["custom_id"]: row for row in rows})

    output = [json.loads(line) for line in api.get(f"/v1/jobs/{job_id}/output").text.splitlines()]
    errors = [json.loads(line) for line in api.get(f"/v1/jobs/{job_id}/errors").text.splitlines()]
    assert output == [row for row in rows if line_error(row) is None]
    assert errors == [row for row in rows if line_error(row) is not None]
    first = errors[0]["response"]["body"]["error"]
    assert (first["code"], first["line"]) == ("invalid_json", 17)
    assert "line 17" in first["message"]

    again = post(api, lines, **{"Idempotency-Key": "night-1"})
    assert again.status_code == 200
    assert again.json()["id"] == job_id
    assert api.get("/v1/jobs/job_unknown").status_code == 404


def check_answers(rows: dict[str, dict[str, Any]]) -> None:
    """What the tiny model said: in OpenAI's shapes, and the same to the same prompt."""
    texts: dict[int, set[str]] = {}
    for n in range(20):
        body = rows[f"row-{n}"]["response"]["body"]
        assert body["model"] == "demo"
        if n % 4:
            choice, usage = body["choices"][0], body["usage"]
            assert (choice["finish_reason"], usage["completion_tokens"]) == ("length", 6)
            texts.setdefault(n % 5, set()).add(choice["text"])
        else:
            scores = [result["mean_nll"] for result in body["results"]]
            assert scores == sorted(scores)
            assert sorted(result["index"] for result in body["results"]) == [0, 1, 2]
    assert all(len(said) == 1 for said in texts.values())
    assert len(texts) == 5


def test_a_cancelled_job(deployment: Deployment, api: httpx.Client) -> None:
    job_id = submit(api, long_lines(600, "long", max_tokens=100))
    wait_until("first results", lambda: landed(api, job_id) > 0, 60)
    answer = api.post(f"/v1/jobs/{job_id}/cancel")
    assert answer.status_code == 200
    assert answer.json()["cancel_requested"]
    ended = wait_over(deployment, api, job_id)
    assert ended["state"] == "cancelled"
    counts = ended["counts"]
    assert counts["cancelled"] > 0
    assert counts["completed"] + counts["cancelled"] == counts["total"] == 600
    rows = page_through(api, job_id, 1000)
    said = Counter(row["error"] and row["error"]["code"] for row in rows)
    assert said == {None: counts["completed"], "batch_cancelled": counts["cancelled"]}
    assert api.post(f"/v1/jobs/{job_id}/cancel").json()["state"] == "cancelled"


def test_flower_shows_every_micro_batch(deployment: Deployment, api: httpx.Client) -> None:
    lines = [completion_line(f"f-{n}", prompt=f"hi {n}", ignore_eos=True) for n in range(3)]
    lines.append(rerank_line("f-3", query="hi", documents=[" a", " b"]))
    job_id = submit(api, [*lines])
    wait_over(deployment, api, job_id)

    with httpx.Client(base_url=deployment.flower_url, auth=AUTH, timeout=30) as flower:

        def shown() -> dict[str, dict[str, Any]]:
            """The job's computed micro-batches by name; a message sent twice was skipped once."""
            tasks = flower.get("/api/tasks", params={"limit": 2000}).json().values()
            ours = [task for task in tasks if job_id in (task["kwargs"] or "")]
            return {task["name"]: task for task in ours if "'done'" in (task["result"] or "")}

        generate = "generate, bucket 32"
        wait_until("Flower to show the job", lambda: len(shown()) == 2, 20)
        task = shown()[generate]
        assert "bucket=32 requests=3 " in task["kwargs"]
        assert "'outcome': 'done', 'requests': 3, 'failed': 0" in task["result"]
        assert "'completion_tokens': 24" in task["result"]
        assert task["worker"].startswith("gpu-")
        rank = next(task for name, task in shown().items() if name != generate)
        assert rank["name"].startswith("rank, bucket ")
        assert "hi" not in rank["kwargs"]  # no prompt leaves SQL

        def workers() -> set[str]:
            found = flower.get("/api/workers", params={"refresh": "true"}).json()
            return {name.split("-")[0] for name in found}

        wait_until("both workers in Flower", lambda: workers() == {"planner", "gpu"}, 20)
        gpu = next(name for name in flower.get("/api/workers").json() if name.startswith("gpu"))
        for path in (f"worker/shutdown/{gpu}", "task/async-apply/nightjar.tick"):
            assert flower.post(f"/api/{path}", json={}).status_code == 403
    for path in ("/", "/api/tasks", "/api/workers", "/metrics"):
        assert httpx.get(f"{deployment.flower_url}{path}").status_code == 401
        wrong = httpx.get(f"{deployment.flower_url}{path}", auth=("owl", "howl"))
        assert wrong.status_code == 401


def test_every_healthcheck_of_a_process_without_http(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("planner", "gpu-worker", "beat", "tasks"):
        command = deployment.compose[name].raw["healthcheck"]["test"]
        assert command[:2] == ["CMD", "nightjar"]
        for variable, value in deployment.environment(name).items():
            monkeypatch.setenv(variable, value)
        # A start of the command takes a second, and all of them are the same but for the part.
        ask = nightjar if name == "planner" else nightjar_here
        asked = ask(*command[2:])
        assert (asked.returncode, asked.stdout) == (0, "ok\n"), asked.stderr


def test_the_commands_of_a_client(
    deployment: Deployment, api: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = nightjar_here("status", "job_1", "--api", deployment.api_url)
    assert (stranger.returncode, "401: this API needs a key" in stranger.stderr) == (1, True)
    monkeypatch.setenv("NIGHTJAR_API_KEY", VARIABLES["API_KEY"])
    where = ("--api", deployment.api_url)
    lines = [*mixed_lines(4, "cli"), "no json"]
    source = write_lines(tmp_path / "in.jsonl", [*lines])
    sent = nightjar("submit", source, *where, "--key", "cli-1")
    assert sent.returncode == 0, sent.stderr
    job_id = json.loads(sent.stdout)["id"]
    wait_over(deployment, api, job_id)
    status = nightjar_here("status", job_id, *where)
    assert json.loads(status.stdout)["state"] == "completed_with_failures"
    (tmp_path / "all").write_text(nightjar("results", job_id, *where).stdout)
    assert [row["custom_id"] for row in read_lines(tmp_path / "all")] == [
        *(f"cli-{n}" for n in range(4)),
        None,
    ]
    failed = nightjar_here("results", job_id, *where, "--outcome", "failed")
    assert json.loads(failed.stdout)["response"]["body"]["error"]["line"] == 5
    cancelled = nightjar_here("cancel", job_id, *where)
    assert json.loads(cancelled.stdout)["state"] == "completed_with_failures"
    unknown = nightjar_here("status", "job_unknown", *where)
    assert unknown.returncode == 1
    assert "404" in unknown.stderr
    assert "job_unknown" in unknown.stderr


def test_the_status_of_the_deployment(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTJAR_API_KEY", VARIABLES["API_KEY"])
    shown = nightjar_here("status", "--api", deployment.api_url)
    assert shown.returncode == 0, shown.stdout
    states = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines() if line[0] != "m")
    assert states["planner"] == states["gpu_workers"] == states["task_runners"] == "ok"
    assert "model demo" in shown.stdout
    assert nightjar_here("status", "--watch", "--api", deployment.api_url).returncode == 2


def test_the_commands_when_the_api_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "back_off_s", lambda tried: 0.0)
    url = f"http://127.0.0.1:{free_port()}"
    source = write_lines(tmp_path / "in.jsonl", [*mixed_lines(4, "cli")])
    for arguments in (["submit", source], ["results", "job_1"]):
        done = nightjar_here(*arguments, "--api", url)
        assert done.returncode == 1
        assert f"{url}/v1/jobs" in done.stderr
        assert "refused" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_health(deployment: Deployment, api: httpx.Client, tmp_path: Path) -> None:
    assert api.get("/health").status_code == 200
    nowhere = f"postgresql://nightjar:secret@127.0.0.1:{free_port()}/nightjar"
    lonely = Deployment(tmp_path, nowhere, Path(deployment.environment("api")["NIGHTJAR_MODEL"]))
    try:
        lonely.services["api"].start()
        with httpx.Client(base_url=lonely.api_url, headers=KEY, timeout=30) as client:
            wait_until("the API without a database", lambda: answers(client), 60)
            health = client.get("/health")
            assert health.status_code == 503
            assert health.json()["status"] == "unavailable"
            refused = post(client, mixed_lines(4, "x"))
            assert refused.status_code == 503, refused.text
            assert refused.json()["error"]["code"] == "database_unavailable"
            assert "secret" not in health.text + refused.text
    finally:
        lonely.stop()


def answers(client: httpx.Client) -> bool:
    try:
        client.get("/openapi.json")
    except httpx.TransportError:
        return False
    return True


@pytest.mark.slow
def test_a_killed_gpu_worker_costs_nothing(deployment: Deployment, api: httpx.Client) -> None:
    job_id = submit(api, long_lines(200, "kill"))
    wait_until("first results", lambda: landed(api, job_id) > 0, 60)
    (compute,) = deployment.children("gpu-worker")
    end_abruptly(deployment.services["gpu-worker"])
    assert job(api, job_id)["state"] == "running"
    wait_until("the orphaned compute process to end", lambda: all_ended([compute]), 20)
    assert deployment.restart_ended() == ["gpu-worker"]
    assert_each_once(api, wait_over(deployment, api, job_id), "kill", 60)


@pytest.mark.slow
def test_a_broker_that_goes_away_and_comes_back(deployment: Deployment, api: httpx.Client) -> None:
    before = submit(api, long_lines(600, "before"))
    wait_until("first results", lambda: landed(api, before) > 0, 60)
    gpu_worker = deployment.services["gpu-worker"].process
    deployment.stop_broker()
    for n in range(2):  # over a connection that broke, and over none
        began = time.monotonic()
        answer = post(api, long_lines(2, f"during{n}", max_tokens=4))
        assert time.monotonic() - began < 5
        assert answer.status_code == 201, answer.text
        assert "broker" in answer.json()["warning"]
        during = answer.json()["id"]
    assert api.get("/health").status_code == 200
    assert job(api, before)["state"] == "running"
    deployment.start_broker()
    assert_each_once(api, wait_over(deployment, api, during), "during1", 4)
    assert_each_once(api, wait_over(deployment, api, before), "before", 60)
    assert post(api, long_lines(1, "after")).json()["warning"] is None
    assert deployment.services["gpu-worker"].process is gpu_worker, "it lost its model"


@pytest.mark.slow
def test_any_order_of_starting(postgres_server: str, tiny_model: Path, tmp_path: Path) -> None:
    """Docker starts everything at once after a reboot: no broker yet, and here no tables either."""
    with (
        fresh_postgres_database(postgres_server) as url,
        running_deployment(tmp_path, url, tiny_model) as running,
        httpx.Client(base_url=running.api_url, headers=KEY, timeout=30) as client,
    ):
        worker = running.services["gpu-worker"]
        worker.environment = {**worker.environment, "NIGHTJAR_ENGINE": "fake"}
        for name in ("gpu-worker", "planner", "beat", "api"):
            running.services[name].start()
        for name in ("gpu-worker", "planner", "beat"):
            log = running.services[name].log
            wait_until(f"{name} to wait", lambda log=log: "refused" in log.read_text(), 60)
        running.start_broker()
        for name in ("gpu-worker", "planner"):
            log = running.services[name].log
            wait_until(f"{name} to go on", lambda log=log: " ready.\n" in log.read_text(), 60)
        wait_until("the API", lambda: answers(client), 60)
        assert client.get("/health").status_code == 503
        early = post(client, mixed_lines(4, "early"))
        assert early.status_code >= 500, early.text
        assert early.json()["error"]["message"]
        running.run_migration()
        job_id = submit(client, mixed_lines(8, "row"))
        assert wait_over(running, client, job_id)["state"] == "completed"
        wait_until("the GPU worker's heartbeat", lambda: heartbeats(url) > 2, 20)


def heartbeats(url: str) -> int:
    engine = sa.create_engine(make_url(url), poolclass=sa.NullPool)
    with engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.sum(worker_table.c.counter))) or 0
