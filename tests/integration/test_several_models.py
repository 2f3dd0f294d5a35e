"""Several models in one deployment: each job gets its own model's answers, none waits for another.

Two real models with different tokenizers, one planner, and real processes.
"""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import Engine, EngineConfig
from nightjar.gpu_worker.models import load_model
from nightjar.gpu_worker.worker.flights import LauncherError
from nightjar.gpu_worker.worker.served import start_models
from nightjar.gpu_worker.worker.starting import open_directories
from nightjar.gpu_worker.worker.worker import GpuWorker
from nightjar.jobs.api.key_ring import Access
from nightjar.jobs.records import ResultRecord
from nightjar.jobs.states import JobState
from nightjar.jobs.store import Store
from nightjar.jobs.store.tables import micro_batch
from nightjar.jobs.store.waiting import WaitsFor
from nightjar.pipeline.front.api_server import _call_path, _celery, application
from nightjar.pipeline.planning.models import KnownModels, PlanningModels
from nightjar.pipeline.planning.planner import Planner
from nightjar.pipeline.settings import Settings, SettingsError
from nightjar.requests import RankRequest
from tests.engines import block_bytes, drain, generate
from tests.jobs import Body, submit
from tests.model_deployment import FAKE, GRACE_S, Deployment, running
from tests.models import Gpt2Shape, save_gpt2
from tests.processes import wait_until
from tests.services import end_abruptly

PROMPTS = ["오늘 저녁에 뭐 먹을까?", "The quick brown fox", "리뷰: 정말 재미있다"]
QUERY, DOCUMENTS = "추천: 된장찌개", ["비빔밥", "The lazy dog", "시간이 아깝다", "김치찌개"]
TOKENS = 6


@dataclass(frozen=True, slots=True)
class Answers:
    """What a model answers to the prompts, and the mean loss of each document."""

    texts: list[str]
    losses: list[float]


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """SQLite alone: the store's own tests have both."""
    return sqlite_url


@pytest.fixture
def deployment(store: Store, database_url: str) -> Iterator[Deployment]:
    with running(database_url) as started:
        yield started


@pytest.fixture(scope="module")
def alpha(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gpt2(tmp_path_factory.mktemp("models") / "alpha")


@pytest.fixture(scope="module")
def beta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another tokenizer, and blocks of the cache that are twice as large."""
    shape = Gpt2Shape(vocab_size=300, n_embd=64)
    return save_gpt2(tmp_path_factory.mktemp("models") / "beta", shape, seed=1)


def own_answers(directory: Path) -> Answers:
    """What a model answers alone, without a queue."""
    model = ModelDirectory.open(directory)
    tokenizer = model.tokenizer()
    engine = Engine(load_model(model, "fp32"), tokenizer.token_bytes, EngineConfig())
    ids = tokenizer.encode_batch(PROMPTS)
    query, *documents = tokenizer.encode_batch([QUERY, *DOCUMENTS])
    asked = [generate(n, prompt, TOKENS, temperature=0.0) for n, prompt in enumerate(ids)]
    results = drain(engine, *asked, RankRequest(len(asked), query, documents))
    texts = [results[n].outputs[0].text.decode(errors="replace") for n in range(len(asked))]
    return Answers(texts, list(results[len(asked)].mean_nll))


def bodies(*models: str | None) -> list[Body]:
    """The prompts and the ranking, once for each name; None names no model."""
    body: Body = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    ranking: Body = {"query": QUERY, "documents": DOCUMENTS}
    return [
        one | ({"model": name} if name else {})
        for name in models
        for one in [*(body | {"prompt": prompt} for prompt in PROMPTS), ranking]
    ]


def answers(results: list[ResultRecord]) -> Answers:
    """What came of one round of the bodies."""
    return answers_of([result.body or {} for result in results])


def answers_of(made: Sequence[Mapping[str, Any]]) -> Answers:
    *completions, ranking = made
    losses = {one["index"]: one["mean_nll"] for one in ranking["results"]}
    return Answers(
        [body["choices"][0]["text"] for body in completions], [losses[n] for n in sorted(losses)]
    )


def named(results: list[ResultRecord]) -> set[str]:
    return {result.body["model"] for result in results if result.body}


def is_over(store: Store, job_id: str) -> bool:
    return store.jobs.get(job_id).is_over


def models_of_work(store: Store) -> dict[str, tuple[int, int]]:
    """The number of micro-batches of each model, and how often they were claimed."""
    row = micro_batch.c
    statement = sa.select(row.fingerprint, sa.func.count(), sa.func.sum(row.attempts))
    with store.database.reading() as connection:
        found = connection.execute(statement.group_by(row.fingerprint)).all()
    return {fingerprint: (count, attempts) for fingerprint, count, attempts in found}


def test_each_job_gets_the_answers_of_its_own_model(
    store: Store, deployment: Deployment, alpha: Path, beta: Path
) -> None:
    """By a worker for each, one of which comes late."""
    own = {path.name: own_answers(path) for path in (alpha, beta)}
    assert own["alpha"].texts != own["beta"].texts
    assert own["alpha"].losses != own["beta"].losses
    deployment.planner(alpha, beta)
    deployment.worker(alpha)
    of_beta = submit(store, bodies(None), model="beta")
    of_alpha = submit(store, bodies(None), model="alpha")
    mixed = submit(store, bodies("beta", None, "gamma"), model="alpha")
    wait_until("alpha's job", lambda: is_over(store, of_alpha))
    assert answers(store.results.read(of_alpha)) == own["alpha"]
    waiting = store.jobs.waiting_for(of_beta)
    assert waiting.waits_for == (WaitsFor.MODEL,)
    assert "no GPU worker serves 'beta'" in (waiting.message or "")
    assert store.jobs.get(of_beta).ended == 0
    deployment.worker(beta)
    wait_until("the other jobs", lambda: is_over(store, of_beta) and is_over(store, mixed))
    assert answers(store.results.read(of_beta)) == own["beta"]
    assert {one.name: one.workers for one in store.models.known()} == {"alpha": 1, "beta": 1}
    rows = store.results.read(mixed)
    assert [answers(rows[0:4]), answers(rows[4:8])] == [own["beta"], own["alpha"]]
    assert {row.error.code for row in rows[8:] if row.error} == {"model_not_found"}
    assert [named(rows[0:4]), named(rows[4:8]), named(rows[8:])] == [{"beta"}, {"alpha"}, set()]


@pytest.mark.slow
def test_one_worker_takes_over_from_the_workers_of_two_models(
    store: Store, deployment: Deployment, alpha: Path, beta: Path
) -> None:
    own = {path.name: own_answers(path) for path in (alpha, beta)}
    deployment.planner(alpha, beta)
    before = [deployment.worker(path) for path in (alpha, beta)]
    for worker in before:
        assert worker.process is not None
        worker.process.terminate()
    deployment.worker(alpha, beta)
    for worker in before:
        worker.stop(GRACE_S)
    jobs = [submit(store, bodies(None), model=name) for name in own]
    wait_until("both jobs", lambda: all(is_over(store, job_id) for job_id in jobs))
    assert [answers(store.results.read(job_id)) for job_id in jobs] == list(own.values())
    assert [named(store.results.read(job_id)) for job_id in jobs] == [{"alpha"}, {"beta"}]
    assert [one.workers for one in store.models.known()] == [1, 1]


@pytest.mark.slow
def test_one_worker_of_two_models_answers_single_calls_of_both(
    store: Store, deployment: Deployment, alpha: Path, beta: Path
) -> None:
    """There is no planner: only the lane of single calls brings work to the worker."""
    deployment.worker(alpha, beta)
    settings = Settings.read(
        models=f"alpha={alpha},beta={beta}",
        broker_url=deployment.environment["NIGHTJAR_BROKER_URL"],
        live_timeout_s=60,
    )
    celery = _celery(settings)
    path = _call_path(settings, store, celery)
    app = application(settings, store, celery, Access(), call_path=path)
    calls = [body for both in zip(bodies("alpha"), bodies("beta"), strict=True) for body in both]

    def call(body: Body) -> Body:
        url = "/v1/rerank" if "query" in body else "/v1/completions"
        answer = client.post(url, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    with TestClient(app) as client, ThreadPoolExecutor(len(calls)) as pool:
        made = list(pool.map(call, calls))
    for name, directory, own in (("alpha", alpha, made[0::2]), ("beta", beta, made[1::2])):
        assert answers_of(own) == own_answers(directory)
        assert {body["model"] for body in own} == {name}


@pytest.mark.slow
def test_a_killed_worker_of_one_model_takes_nothing_from_the_other(
    store: Store, deployment: Deployment, alpha: Path, beta: Path
) -> None:
    slow = {**FAKE, "NIGHTJAR_FAKE_STEP_S": "0.05"}
    small = {"NIGHTJAR_MICRO_BATCH_REQUESTS": "2"}
    deployment.planner(alpha, beta, **small)
    deployment.worker(alpha, **slow)
    killed = deployment.worker(beta, **slow)
    body: Body = {"prompt": "a", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    jobs = [submit(store, [body] * 40, model=name) for name in ("beta", "alpha")]
    wait_until("both to be computed", lambda: all(store.jobs.get(one).ended for one in jobs))
    end_abruptly(killed)
    wait_until("alpha's job", lambda: is_over(store, jobs[1]))
    assert not is_over(store, jobs[0])
    assert store.jobs.get(jobs[1]).state is JobState.COMPLETED
    assert models_of_work(store)[ModelDirectory.open(alpha).fingerprint] == (20, 20)
    deployment.worker(beta, **FAKE)
    wait_until("beta's job", lambda: is_over(store, jobs[0]))
    assert store.jobs.get(jobs[0]).state is JobState.COMPLETED
    assert [len(store.results.read(job_id)) for job_id in jobs] == [40, 40]


def test_a_crash_of_one_model_in_a_worker_of_two_takes_nothing_from_the_other(
    store: Store, alpha: Path, beta: Path
) -> None:
    settings = Settings.read(models=f"alpha={alpha},beta={beta}", engine="fake", fake_step_s=0.5)
    body: Body = {"prompt": "a", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    jobs = [submit(store, [body] * 2, model=name) for name in ("alpha", "beta")]
    planning = PlanningModels.open(settings, store)
    KnownModels(store.models, planning).write(leads=True)
    planner = Planner(settings, store, planning)
    while planner.plan_next():
        pass
    refs = {ref.job_id: ref for ref in store.planning.dispatchable(9)}
    models = start_models(settings, store, open_directories(settings), print)
    worker = GpuWorker(store, models, crashes_allowed=2)
    try:
        worker.keep_alive()
        assert [one.workers for one in store.models.known()] == [1, 1]
        with ThreadPoolExecutor(2) as threads:
            of_alpha, of_beta = (
                threads.submit(worker.run, refs[job_id].id, refs[job_id].epoch) for job_id in jobs
            )
            runs = (of_alpha, of_beta)
            wait_until(
                "both",
                lambda: (
                    all(model.launcher.in_flight for model in models)
                    or any(run.done() for run in runs)
                ),
            )
            assert [run.result() for run in runs if run.done()] == []
            os.kill(models[0].launcher.pid, signal.SIGKILL)
            assert of_alpha.result().outcome == "crashed: compute process lost"
            assert of_beta.result().outcome == "done"
        halves = store.planning.dispatchable(9)
        assert {(half.job_id, half.isolated) for half in halves} == {(jobs[0], True)}
        outcomes = [worker.run(half.id, half.epoch, alone=True).outcome for half in halves]
        assert outcomes == ["done", "done"]
    finally:
        for model in models:
            model.launcher.close()
    worker.leave()
    assert [one.workers for one in store.models.known()] == [0, 0]
    assert [store.jobs.get(job_id).state for job_id in jobs] == [JobState.COMPLETED] * 2


def test_a_worker_that_cannot_load_one_of_its_models_says_which_and_serves_none(
    store: Store, alpha: Path, beta: Path
) -> None:
    of_alpha = block_bytes(load_model(ModelDirectory.open(alpha), "fp32"))
    settings = Settings.read(
        models=f"alpha={alpha},beta={beta}",
        dtype="fp32",
        compute_threads=2,
        kv_cache_bytes=2 * of_alpha,  # a half has room for a block of alpha, and for none of beta
    )
    ended: list[str] = []
    with pytest.raises(LauncherError, match=r"the model 'beta': .*kv_cache_bytes"):
        start_models(settings, store, open_directories(settings), ended.append)
    assert len(ended) == 1  # alpha's process was ended, and did not fail


def test_models_on_one_gpu_need_the_bytes_that_they_divide(store: Store, alpha: Path) -> None:
    settings = Settings.read(models=f"alpha={alpha},same={alpha}/", device="cuda")
    with pytest.raises(SettingsError, match="'alpha' and 'same' are the same model"):
        open_directories(settings)
    directory = ModelDirectory.open(alpha)
    with pytest.raises(SettingsError, match="NIGHTJAR_KV_CACHE_BYTES"):
        start_models(settings, store, {"alpha": directory, "beta": directory}, print)
