"""Two real models with different tokenizers on one broker: the wrong one never answers."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import Engine, EngineConfig
from nightjar.gpu_worker.models import load_model
from nightjar.jobs.states import JobState, MicroBatchState
from nightjar.jobs.store import Store
from nightjar.pipeline.embedded.broker import broker_command, broker_url, wait_for_broker
from nightjar.pipeline.embedded.processes import Service
from nightjar.pipeline.queue.commands import WorkerRole, beat_command, worker_command
from nightjar.pipeline.queue.queues import compute_queues, short_model
from nightjar.pipeline.settings import Settings
from tests.engines import drain, generate
from tests.jobs import submit
from tests.models import Gpt2Shape, save_gpt2
from tests.processes import wait_until

GRACE_S = 10
PROMPTS = ["오늘 저녁에 뭐 먹을까?", "The quick brown fox", "리뷰: 정말 재미있다"]
TOKENS = 6
FAKE = {"NIGHTJAR_ENGINE": "fake"}  # where it does not matter what is answered


class Deployment:
    """A broker and its clock; planners and GPU workers of any model are started one by one."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.folder = folder
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("NIGHTJAR_")}
        self.environment = inherited | {
            "NIGHTJAR_DATABASE_URL": database_url,
            "NIGHTJAR_BROKER_URL": broker_url(folder),
            "NIGHTJAR_DTYPE": "fp32",
            "NIGHTJAR_COMPUTE_THREADS": "1",
            "NIGHTJAR_ACCEPT_ANY_MODEL": "true",
            "NIGHTJAR_SWEEP_EVERY_S": "0.3",
            "NIGHTJAR_REDISPATCH_AFTER_S": "1",
            "PYTHONPATH": os.environ.get("PYTHONPATH", str(Path.cwd())),
        }
        self.services: list[Service] = []
        self.redis = redis.Redis(unix_socket_path=str(folder / "broker.sock"))
        wait_for_broker(folder, self._start("broker", broker_command(folder)))
        self._start("beat", beat_command())

    def planner(self, model: Path, **given: str) -> Service:
        """Start a planner that serves this model."""
        command = worker_command(WorkerRole.PLAN, Settings.read())
        given |= {"NIGHTJAR_MODEL": str(model)}
        return self._start(
            f"planner-{model.name}", [*command, f"--hostname=p{model.name}@%h"], given
        )

    def worker(self, model: Path, **given: str) -> Service:
        """Start a GPU worker of this model, and wait until it takes messages."""
        command = worker_command(WorkerRole.COMPUTE, Settings.read())
        command = [*command, f"--hostname=w{model.name}@%h"]
        given |= {"NIGHTJAR_MODEL": str(model)}
        worker = self._start(f"worker-{model.name}", command, given)
        wait_until("the worker", lambda: " ready." in worker.log.read_text())
        return worker

    def messages(self, model: Path) -> int:
        """How many messages wait in the queues of a model."""
        names = compute_queues(ModelDirectory.open(model).fingerprint)
        return sum(self.redis.llen(key) for name in names for key in (name, f"{name}\x06\x169"))  # type: ignore[misc]  # the client may be asynchronous, this one is not

    def stop(self) -> None:
        self.redis.close()
        for service in reversed(self.services):
            service.stop(GRACE_S)

    def _start(self, name: str, command: list[str], given: dict[str, str] | None = None) -> Service:
        log = self.folder / f"{name}-{len(self.services)}.log"
        service = Service(name, command, log, self.environment | (given or {}), self.folder)
        self.services.append(service)
        service.start()
        return service


@pytest.fixture
def deployment(store: Store, database_url: str) -> Iterator[Deployment]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="nightjar-"))
        running = Deployment(Path(folder), database_url)
        stack.callback(running.stop)
        yield running


@pytest.fixture(scope="module")
def alpha(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gpt2(tmp_path_factory.mktemp("models") / "alpha")


@pytest.fixture(scope="module")
def beta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Gpt2Shape(vocab_size=300)
    return save_gpt2(tmp_path_factory.mktemp("models") / "beta", shape, seed=1)


def submit_prompts(store: Store) -> str:
    body = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return submit(store, [body | {"prompt": prompt} for prompt in PROMPTS])


def own_answers(directory: Path) -> list[str]:
    """What a model answers to the prompts."""
    model = ModelDirectory.open(directory)
    tokenizer = model.tokenizer()
    engine = Engine(load_model(model, "fp32"), tokenizer.token_bytes, EngineConfig())
    ids = tokenizer.encode_batch(PROMPTS)
    asked = [generate(n, prompt, TOKENS, temperature=0.0) for n, prompt in enumerate(ids)]
    results = drain(engine, *asked)
    return [results[n].outputs[0].text.decode(errors="replace") for n in range(len(PROMPTS))]


def texts(store: Store, job_id: str) -> list[str]:
    return [r.body["choices"][0]["text"] for r in store.results.read(job_id) if r.body]


def own_tokens(directory: Path) -> list[int]:
    """How many tokens a model makes of each prompt."""
    return [len(ids) for ids in ModelDirectory.open(directory).tokenizer().encode_batch(PROMPTS)]


def prompt_tokens(store: Store, job_id: str) -> list[int]:
    return [result.prompt_tokens for result in store.results.read(job_id)]


def is_over(store: Store, job_id: str) -> bool:
    return store.jobs.get(job_id).is_over


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_worker_of_another_model_never_answers(
    store: Store, deployment: Deployment, alpha: Path, beta: Path
) -> None:
    assert own_answers(alpha) != own_answers(beta)
    wrong = deployment.worker(beta)
    deployment.planner(alpha)
    job_id = submit_prompts(store)
    wait_until("a message", lambda: deployment.messages(alpha))
    deployment.worker(alpha)
    wait_until("the job", lambda: is_over(store, job_id))
    assert store.jobs.get(job_id).state is JobState.COMPLETED
    assert texts(store, job_id) == own_answers(alpha)
    named = {result.body["model"] for result in store.results.read(job_id) if result.body}
    assert named == {alpha.name}
    assert "nightjar.compute" not in wrong.log.read_text().partition(" ready.")[2]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_job_goes_on_when_the_deployment_serves_another_model(
    store: Store, deployment: Deployment, alpha: Path, beta: Path
) -> None:
    planner = deployment.planner(alpha, **FAKE)
    job_id = submit_prompts(store)
    wait_until("a message", lambda: deployment.messages(alpha))
    planner.stop(GRACE_S)
    deployment.planner(beta, **FAKE)
    deployment.worker(beta, **FAKE)
    wait_until("the job", lambda: is_over(store, job_id))
    assert prompt_tokens(store, job_id) == own_tokens(beta)
    assert store.jobs.get_in_detail(job_id)[1][MicroBatchState.REPLANNED] == 1
    assert deployment.messages(alpha) == 0


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_old_work_is_left_to_the_workers_of_its_model_if_so_set(
    store: Store, deployment: Deployment, alpha: Path, beta: Path
) -> None:
    planner = deployment.planner(alpha, **FAKE)
    old = submit_prompts(store)
    wait_until("a message", lambda: deployment.messages(alpha))
    planner.stop(GRACE_S)
    second = deployment.planner(beta, **FAKE, NIGHTJAR_ON_MODEL_CHANGE="finish")
    deployment.worker(beta, **FAKE)
    new = submit_prompts(store)
    wait_until("the new job", lambda: is_over(store, new))
    assert prompt_tokens(store, new) == own_tokens(beta)
    said = f"wait for a worker of the model {short_model(ModelDirectory.open(alpha).fingerprint)}"
    wait_until("a warning", lambda: said in second.log.read_text())
    assert deployment.messages(alpha) == 1  # it is there, and not sent again
    assert store.jobs.get(old).ended == 0
    deployment.worker(alpha, **FAKE)
    wait_until("the old job", lambda: is_over(store, old))
    assert prompt_tokens(store, old) == own_tokens(alpha)
