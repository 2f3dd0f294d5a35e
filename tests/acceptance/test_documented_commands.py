"""The shell blocks of the guides, run as they are written against real processes."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa
from safetensors.numpy import load_file, save_file

from nightjar.jobs.store import Store
from nightjar.pipeline.embedded.broker import broker_command, broker_url
from nightjar.pipeline.embedded.processes import Service, private_directory
from tests.adapters import gpt2_sizes, save_adapter
from tests.documents import ROOT
from tests.megatron_models import gpt2, save_whole_tokenizer
from tests.megatron_writer import Layout, write_checkpoint
from tests.monitored import Monitored, monitored
from tests.processes import wait_until
from tests.receivers import receiving
from tests.scenes import Scene, playing
from tests.services import free_port
from tests.source_logits import demo_outputs, saved

pytestmark = pytest.mark.slow
KEY = "the-key-of-the-documents-0123456789"
DEMO = ROOT / "examples" / "demo_model"
TASK = """kind = "generate"
[source]
parquet = "rows.parquet"
key = ["id"]
[request]
prompt = "{text}"
[parameters]
max_tokens = 4
[sink]
parquet = "answers.parquet"
"""
Play = Callable[[str], AbstractContextManager[Scene]]


@pytest.fixture(scope="module")
def system(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    """A deployment in which most of the guides' commands work."""
    folder = tmp_path_factory.mktemp("documented")
    (folder / "tasks").mkdir()
    settings = {
        "NIGHTJAR_FAKE_STEP_S": "0.05",
        "NIGHTJAR_ENGINE": "fake",
        "NIGHTJAR_TASK_FOLDER": str(folder / "tasks"),
    }
    parts = ("api", "planner", "gpu-worker", "beat")
    url = f"sqlite:///{folder / 'n.db'}"
    with monitored(url, tiny_model, folder, KEY, parts, **settings) as running:
        yield running


@pytest.fixture
def play(system: Monitored, tmp_path: Path) -> Play:
    """Opens a scene beside the deployment; IN.jsonl is there."""
    variables = {k: v for k, v in system.environment.items() if k.startswith("NIGHTJAR_")}
    variables["NIGHTJAR_API"] = api_of(system)

    def opened(name: str) -> AbstractContextManager[Scene]:
        write_lines(tmp_path / "IN.jsonl", 3)
        return playing(name, tmp_path, variables)

    return opened


@pytest.fixture
def alone(tmp_path: Path, tiny_model: Path) -> Play:
    """Opens a scene on a machine where nothing of Nightjar runs, over a new database."""
    variables = {
        "NIGHTJAR_DATABASE_URL": f"sqlite:///{tmp_path / 'n.db'}",
        "NIGHTJAR_MODEL": str(tiny_model),
        "NIGHTJAR_VERIFY": "off",
        "NIGHTJAR_ENGINE": "fake",
    }

    def opened(name: str) -> AbstractContextManager[Scene]:
        return playing(name, tmp_path, variables)

    return opened


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[str]:
    """The URL of a broker on a port, with the password that the guide names."""
    directory, port = private_directory(), free_port()
    place = ["--bind", "127.0.0.1", "--port", str(port), "--requirepass", "PASSWORD"]
    command = [*broker_command(directory), *place]
    service = Service("broker", command, tmp_path / "broker.log", {}, directory)
    service.start()
    yield f"redis://:PASSWORD@127.0.0.1:{port}/0"
    service.stop(10)
    shutil.rmtree(directory, ignore_errors=True)


def api_of(system: Monitored) -> str:
    return f"http://127.0.0.1:{system.ports['api']}"


def write_lines(path: Path, rows: int, prompt: str = "hoot", **body: Any) -> str:
    """Lines of completions; returns them."""
    text = "\n".join(
        json.dumps(
            {
                "custom_id": f"row-{n}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": f"{prompt} {n}", "max_tokens": 4, "seed": n, **body},
            }
        )
        for n in range(rows)
    )
    path.write_text(text + "\n", encoding="utf-8")
    return text


def submitted(system: Monitored, folder: Path, rows: int, prompt: str = "hoot") -> str:
    """A new job; returns its id."""
    lines = write_lines(folder / "other.jsonl", rows, prompt)
    with system.client as client:
        made = client.post("/v1/jobs", content=lines).raise_for_status()
    job_id: str = made.json()["id"]
    return job_id


def over(system: Monitored, folder: Path, prompt: str = "hoot") -> str:
    """A job that has ended."""
    job_id = submitted(system, folder, 2, prompt)
    with system.client as client:

        def ended() -> bool:
            state: str = client.get(f"/v1/jobs/{job_id}").json()["state"]
            return state in ("completed", "completed_with_failures", "failed")

        wait_until("the end of a job", ended, 60)
    return job_id


def state_of(system: Monitored, job_id: str) -> str:
    with system.client as client:
        state: str = client.get(f"/v1/jobs/{job_id}").raise_for_status().json()["state"]
    return state


def answers(url: str, key: str | None = None) -> bool:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        return httpx.get(url, headers=headers, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def parts(url: str) -> Mapping[str, str]:
    """What the health of an API says of each part; empty where nobody answers."""
    try:
        found: Mapping[str, str] = httpx.get(f"{url}/health", timeout=5).json()["parts"]
    except httpx.TransportError:
        return {}
    return found


def save_vectors(path: Path, number: float, width: int = 32) -> Path:
    save_file({"vectors": np.full((2, width), number, np.float32)}, path)
    return path


def test_keys(play: Play, system: Monitored) -> None:
    with play("keys") as scene:
        made = scene.text("nightjar migrate")
        used = scene.text("export", {"localhost:8000": api_of(system).removeprefix("http://")})
        told = scene.shell(f'{made}{used}\necho "KEY=$KEY"')
        key = told.rpartition("KEY=")[2].strip()
        shown = scene.run("nightjar keys list", {"nj_k3x09ab7": "_".join(key.split("_")[:2])})
        assert "nightly scores" in shown
    wait_until("the end of the key", lambda: not answers(f"{api_of(system)}/v1/jobs", key), 30)


def test_tenants(play: Play) -> None:
    with play("tenants") as scene:
        listed = scene.run("nightjar tenants create").splitlines()[-1]
        assert "owls" in listed


def test_the_clients_commands(play: Play, system: Monitored, tmp_path: Path) -> None:
    with play("client") as scene:
        done, failed = over(system, tmp_path), over(system, tmp_path, "<poison:raise>")
        many = 3_000
        open_jobs = {name: submitted(system, tmp_path, many) for name in ("pause", "resume")}
        open_jobs["cancel"] = submitted(system, tmp_path, many)
        with system.client as client:
            client.post(f"/v1/jobs/{open_jobs['resume']}/pause").raise_for_status()
        jobs = {"status": done, "results": done, "retry": failed, **open_jobs}
        vectors = save_vectors(tmp_path / "v.safetensors", 1.0)
        for line in scene.text("nightjar submit").splitlines():
            word = line.split()[1]
            told = line.replace("JOB", jobs.get(word, "")).replace("NAME FILE", f"owl {vectors}")
            assert scene.shell(told).strip() or "--watch" in line, line
        assert state_of(system, open_jobs["pause"]) == "paused"
        assert state_of(system, open_jobs["resume"]) in ("queued", "running")
        assert state_of(system, open_jobs["cancel"]).startswith("cancel")
        assert state_of(system, failed) != "completed"
        with system.client as client:
            for job_id in (open_jobs["pause"], open_jobs["resume"]):
                client.post(f"/v1/jobs/{job_id}/cancel").raise_for_status()


def test_reports(play: Play, system: Monitored, tmp_path: Path, tiny_model: Path) -> None:
    with play("reports") as scene:
        scene.run("nightjar run IN.jsonl", {"DIR": str(tiny_model)})
        job_id = over(system, tmp_path)
        scene.run("nightjar report JOB", {"JOB": job_id})
        assert "</html>" in (tmp_path / f"{job_id}.report.html").read_text(encoding="utf-8")
        assert (tmp_path / "OUT.jsonl.work" / "report.html").is_file()


def test_the_bill(play: Play, system: Monitored) -> None:
    with play("bill") as scene:
        with system.client as client:
            fields = {"cron": "0 2 * * *", "time_zone": "UTC", "task": "rank.toml"}
            client.put("/v1/schedules/rank", json=fields).raise_for_status()
        told = scene.run("nightjar bill").splitlines()
        assert set(json.loads(told[-1])) == {"tenant", "schedule", "jobs", "total"}


def test_retention(play: Play, system: Monitored, tmp_path: Path) -> None:
    with play("retention") as scene:
        scene.shell("nightjar tenants create bats")
        scene.run("NIGHTJAR_KEEP_RESULTS", {"owls": "bats"})
        done = over(system, tmp_path)
        text = scene.text("nightjar purge", {"job_019a8f0e6c1b2d": done, "owls": "bats"})
        for line in text.splitlines():
            # Where no person is at a terminal, it must be told not to ask.
            asks = "--yes" not in line and "--dry-run" not in line
            scene.shell(line.partition("#")[0] + (" --yes" if asks else ""))
        with system.client as client:
            assert client.get(f"/v1/jobs/{done}/results").status_code == 410


def test_export(play: Play, system: Monitored, tmp_path: Path) -> None:
    with play("export") as scene:
        scene.run("nightjar export JOB", {"JOB": over(system, tmp_path)})
        for name in ("night", "table"):
            manifest = tmp_path / "exports" / name / "_manifest.json"
            files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
            assert all((manifest.parent / one["name"]).is_file() for one in files)


def test_schedules(play: Play, system: Monitored, tmp_path: Path) -> None:
    with play("schedules") as scene:
        (tmp_path / "rank.toml").write_text(TASK, encoding="utf-8")
        pq.write_table(pa.table({"id": [1, 2], "text": ["a", "b"]}), tmp_path / "rows.parquet")
        page = (ROOT / "docs" / "guides" / "schedules.md").read_text(encoding="utf-8")
        example = page.partition("```toml\n")[2].partition("```")[0]
        (tmp_path / "schedules.toml").write_text(example, encoding="utf-8")
        with scene.started(scene.text("nightjar worker tasks")):
            told = scene.run("nightjar schedules apply")
            assert "rank" in told

            def succeeded() -> bool:
                return "succeeded" in scene.shell("nightjar schedules history rank")

            wait_until("the run of the schedule", succeeded, 60)
            scene.shell("nightjar health tasks")
        assert pq.read_table(tmp_path / "answers.parquet").num_rows == 2
        scene.variables["KEY"] = KEY
        address = {"http://127.0.0.1:8000": api_of(system)}
        said = json.loads(scene.run("curl -X PUT", address))
        assert (said["task"], said["time_zone"]) == ("nightly/rank.toml", "Asia/Seoul")


def test_webhooks(play: Play, system: Monitored, tmp_path: Path) -> None:
    with (
        play("webhooks") as scene,
        receiving() as receiver,
        closing(Store(system.database_url)) as store,
    ):
        here = {"https://example.org/nightjar": receiver.url}
        api = {"localhost:8000": api_of(system).removeprefix("http://")}
        made = json.loads(scene.run("curl", here | api))
        assert made["secret"].startswith("whsec_")
        over(system, tmp_path)
        wait_until("an event", lambda: receiver.received, 30)
        wait_until("its record", lambda: store.deliveries.newest(made["id"], 1), 30)
        (delivery,) = store.deliveries.newest(made["id"], 1)
        ids = {"whd_019a8f0e6c1b2d": delivery.id, "wh_019a8f0e6c1b2d": made["id"]}
        listed = scene.run("SECRET=", here | ids, 'echo "$SECRET"')
        assert listed.splitlines()[-1].startswith("whsec_")
        assert made["id"] in listed
        left = [one.id for one in store.webhooks.newest("default", 9)]
        assert made["id"] not in left


def test_commands_for_programs(play: Play, tmp_path: Path) -> None:
    with play("for programs") as scene:
        scene.run("job=")
        lines = (tmp_path / "OUT.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["custom_id"] for line in lines] == ["row-0", "row-1", "row-2"]


def test_the_openapi_document(play: Play, system: Monitored, tmp_path: Path) -> None:
    with play("openapi") as scene:
        api = {"localhost:8000": api_of(system).removeprefix("http://")}
        served = json.loads(scene.run("curl", api))
        assert served == json.loads((tmp_path / "openapi.json").read_text(encoding="utf-8"))


def test_top(play: Play) -> None:
    with play("top") as scene:
        assert "GPU workers" in scene.run("nightjar top")


def test_tables(play: Play, tmp_path: Path) -> None:
    with play("tables") as scene:
        text = {"id": [1, 2], "text": ["a", "b"]}
        pq.write_table(pa.table(text), tmp_path / "rows.parquet")
        model = f'model = "{scene.variables["NIGHTJAR_MODEL"]}"\n'
        (tmp_path / "task.toml").write_text(model + TASK, encoding="utf-8")
        scene.run("nightjar plan")
        assert pq.read_table(tmp_path / "answers.parquet").num_rows == 2


def test_completion(alone: Play, tmp_path: Path) -> None:
    with alone("completion") as scene:
        shown = scene.run("nightjar --install-completion")
        assert "_NIGHTJAR_COMPLETE" in shown
        assert "nightjar" in (tmp_path / ".bashrc").read_text(encoding="utf-8")


def test_the_migration_of_an_upgrade(alone: Play, tmp_path: Path) -> None:
    with alone("upgrading") as scene:
        scene.run("nightjar migrate")
        with closing(Store(f"sqlite:///{tmp_path / 'n.db'}")) as store:
            store.ping()


def test_traces(alone: Play) -> None:
    read = "python -c 'from nightjar.pipeline.settings import Settings as S; "
    read += "print(S.read().trace_share)'"
    with alone("traces") as scene:
        assert scene.run("export", more=read).strip() == "0.01"


def test_the_page(alone: Play) -> None:
    with alone("page") as scene:
        port = free_port()
        scene.shell("nightjar migrate")
        with scene.started(scene.text("nightjar api", {"8000": str(port)})):
            wait_until("the page", lambda: answers(f"http://127.0.0.1:{port}/ui/"), 60)


def test_processes_with_metrics(alone: Play, broker: str) -> None:
    with alone("metrics") as scene:
        scene.shell("nightjar migrate")
        scene.variables |= {"NIGHTJAR_BROKER_URL": broker, "NIGHTJAR_MESSAGE_KEY": "owls" * 8}
        ports = {str(old): str(free_port()) for old in (9464, 9465, 9466)}
        with scene.started(scene.text("NIGHTJAR_METRICS_ADDRESS", ports)):
            for port in ports.values():
                url = f"http://127.0.0.1:{port}/metrics"
                wait_until(f"the metrics at {port}", lambda url=url: answers(url), 60)


def test_the_processes_of_a_deployment(
    alone: Play, broker: str, postgres_url: str, tiny_model: Path
) -> None:
    url = sa.make_url(postgres_url).set(drivername="postgresql")
    api, flower = free_port(), free_port()
    with alone("processes") as scene:
        for name in ("NIGHTJAR_DATABASE_URL", "NIGHTJAR_MODEL"):
            del scene.variables[name]
        text = scene.text(
            "export NIGHTJAR_DATABASE_URL",
            {
                "postgresql://USER:PASSWORD@HOST/NAME": f"'{url.render_as_string(False)}'",
                "redis://:PASSWORD@HOST:6379/0": broker,
                "=DIR": f"={tiny_model}",
                "=SECRET": f"={'owls' * 8}",
                "nightjar api &": f"nightjar api --port={api} &",
                "nightjar flower &": f"nightjar flower --port={flower} &",
            },
        )
        with scene.started(text):
            health = f"http://127.0.0.1:{api}"
            wait_until("all parts", lambda: set(parts(health).values()) == {"ok"}, 90)
            wait_until("Flower", lambda: answers(f"http://127.0.0.1:{flower}/healthcheck"), 60)


def test_several_models(alone: Play, tiny_model: Path, tmp_path: Path) -> None:
    directory, api = private_directory(), free_port()
    command = broker_command(directory)
    service = Service("broker", command, tmp_path / "broker.log", {}, directory)
    service.start()
    try:
        with alone("several models") as scene:
            del scene.variables["NIGHTJAR_MODEL"]
            scene.variables["NIGHTJAR_BROKER_URL"] = broker_url(directory)
            scene.variables["NIGHTJAR_API"] = f"http://127.0.0.1:{api}"
            scene.shell("nightjar migrate")
            write_lines(tmp_path / "IN.jsonl", 2)
            large = shutil.copytree(tiny_model, tmp_path / "large")
            weights = load_file(large / "model.safetensors")
            name = next(iter(weights))
            weights[name] = weights[name] + 1  # another model has another fingerprint
            save_file(weights, large / "model.safetensors")
            replaced = {
                "/models/small": str(tiny_model),
                "/models/large": str(large),
                "nightjar api &": f"nightjar api --port={api} &",
            }
            with scene.started(scene.text("export NIGHTJAR_MODELS", replaced)):
                health = f"http://127.0.0.1:{api}"
                wait_until("all parts", lambda: set(parts(health).values()) == {"ok"}, 90)
                scene.run("nightjar models")
                wait_until("both models", lambda: "org/large" in scene.shell("nightjar models"), 60)
    finally:
        service.stop(10)
        shutil.rmtree(directory, ignore_errors=True)


def test_tuning(alone: Play, tiny_model: Path, tmp_path: Path) -> None:
    with alone("tuning") as scene:
        models = tmp_path / "models" / "gpt"
        shutil.copytree(tiny_model, models)
        scene.variables["NIGHTJAR_MODEL"] = str(models)
        scene.variables["NIGHTJAR_MODEL_NAME"] = "gpt"
        scene.shell("nightjar migrate")
        rows = [{"query": f"word {n}", "documents": [" a", " b"], "best": n % 2} for n in range(20)]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        scene.run("nightjar tune")
        scene.run("nightjar vectors add")
        for number in (2, 3):
            scene.shell(
                f"nightjar vectors add reviews {save_vectors(tmp_path / 'v.safetensors', number)}"
            )
        told = scene.run("nightjar vectors list")
        assert "reviews@live is version 3" in told
        assert "reviews@latest is version 2" in told


def test_adapters(alone: Play, tiny_model: Path, tmp_path: Path) -> None:
    with alone("adapters") as scene:
        scene.variables["NIGHTJAR_MODEL"] = str(tiny_model)
        scene.variables["NIGHTJAR_MODEL_NAME"] = "gpt"
        scene.shell("nightjar migrate")
        save_adapter(tmp_path / "lora" / "polite", gpt2_sizes(2, 32, 128))
        scene.run("nightjar vectors add")
        assert "polite" in scene.shell("nightjar vectors list")


def test_converting(alone: Play, tmp_path: Path) -> None:
    with alone("converting") as scene:
        write_checkpoint(gpt2(), tmp_path / "checkpoints" / "gpt", Layout(tp=2))
        (tmp_path / "tokenizer").mkdir()
        save_whole_tokenizer(tmp_path / "tokenizer")
        write_lines(tmp_path / "requests.jsonl", 2)
        scene.run("nightjar convert")
        assert len((tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()) == 2


def test_verifying(alone: Play, tmp_path: Path) -> None:
    with alone("verifying") as scene:
        shutil.copytree(DEMO, tmp_path / "models" / "gpt")
        saved(demo_outputs(), tmp_path / "source.safetensors")
        sample = "사용자: 안녕\n클로바: 반갑습니다\n" * 20
        (tmp_path / "sample.txt").write_text(sample, encoding="utf-8")
        scene.run("nightjar verify models/gpt")
        assert "</html>" in (tmp_path / "gpt.html").read_text(encoding="utf-8")
        scene.run("nightjar verify models/gpt --prec")
