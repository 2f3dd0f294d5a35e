"""Two real models with different tokenizers on one broker: the wrong one never answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import Engine, EngineConfig
from nightjar.gpu_worker.models import load_model
from nightjar.jobs.states import JobState, MicroBatchState
from nightjar.jobs.store import Store
from nightjar.pipeline.queue.queues import short_model
from tests.engines import drain, generate
from tests.jobs import submit
from tests.model_deployment import FAKE, GRACE_S, Deployment, running
from tests.models import Gpt2Shape, save_gpt2
from tests.processes import wait_until

PROMPTS = ["오늘 저녁에 뭐 먹을까?", "The quick brown fox", "리뷰: 정말 재미있다"]
TOKENS = 6


@pytest.fixture
def deployment(store: Store, database_url: str) -> Iterator[Deployment]:
    with running(database_url) as started:
        yield started


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
