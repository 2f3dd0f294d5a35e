"""Single calls by the clients that people have, against the processes of a deployment."""

import json
from collections.abc import Iterator
from typing import Any

import cohere
import httpx
import openai
import pytest
import sqlalchemy as sa
from langchain_cohere import CohereRerank
from langchain_core.documents import Document

from nightjar.jobs.states import JobState
from nightjar.jobs.store import Store
from nightjar.jobs.store.tables import job as table
from tests.databases import fresh_postgres_database
from tests.models import save_gpt2
from tests.processes import completion_line, rerank_line, wait_until
from tests.services import VARIABLES, Deployment, running_deployment

KEY = {"Authorization": f"Bearer {VARIABLES['API_KEY']}"}
MODEL = "demo"  # as docker-compose.yml names it
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
MESSAGES: Any = [{"role": "user", "content": "hello"}]
DOCUMENTS = [" a", " blue sky", " 하늘", " hello", " blue"]
RANKING: dict[str, Any] = {"query": "hello", "documents": DOCUMENTS}
GREEDY: dict[str, Any] = {"prompt": "hello", "max_tokens": 12, "temperature": 0, "logprobs": 3}


@pytest.fixture(scope="module")
def deployment(
    postgres_server: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """A GPU worker with one thread for micro-batches of jobs."""
    directory = tmp_path_factory.mktemp("calls")
    model = save_gpt2(directory / MODEL)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with (
        fresh_postgres_database(postgres_server) as url,
        running_deployment(directory, url, model) as running,
    ):
        running.start_broker()
        running.run_migration()
        worker = running.services["gpu-worker"]
        worker.environment = {**worker.environment, "NIGHTJAR_WORKER_THREADS": "1"}
        for name in ("api", "planner", "gpu-worker"):
            running.services[name].start()
        running.wait_for_api()
        wait_until("the GPU worker", lambda: answers(running), 240)
        yield running


def answers(deployment: Deployment) -> bool:
    """Whether a call is answered; the worker loads its model first."""
    try:
        url = f"{deployment.api_url}/v1/completions"
        return httpx.post(
            url, json={"prompt": "a", "max_tokens": 1}, timeout=10, headers=KEY
        ).is_success
    except httpx.TimeoutException:
        return False


@pytest.fixture
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    url = f"{deployment.api_url}/v1"
    with openai.OpenAI(
        base_url=url, api_key=VARIABLES["API_KEY"], timeout=100, max_retries=0
    ) as client:
        yield client


@pytest.fixture
def ranker(deployment: Deployment) -> Iterator[cohere.ClientV2]:
    with httpx.Client(timeout=100) as http:
        yield cohere.ClientV2(VARIABLES["API_KEY"], base_url=deployment.api_url, httpx_client=http)


def submit(deployment: Deployment, lines: list[dict[str, Any]]) -> str:
    content = "\n".join(map(json.dumps, lines))
    answer = httpx.post(f"{deployment.api_url}/v1/jobs", content=content, timeout=60, headers=KEY)
    return str(answer.raise_for_status().json()["id"])


def job(deployment: Deployment, job_id: str) -> dict[str, Any]:
    answer = httpx.get(f"{deployment.api_url}/v1/jobs/{job_id}", timeout=60, headers=KEY)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def outcomes(deployment: Deployment, job_id: str) -> list[dict[str, Any]]:
    """The bodies of a job's answers, once it is over."""
    wait_until("the job", lambda: job(deployment, job_id)["finished_at"] is not None)
    page = httpx.get(
        f"{deployment.api_url}/v1/jobs/{job_id}/results", timeout=60, headers=KEY
    ).json()
    return [line["response"]["body"] for line in page["data"]]


def test_openais_client_gets_completions_and_chats(client: openai.OpenAI) -> None:
    text = client.completions.create(model=MODEL, prompt="hello", max_tokens=8)
    assert text.object == "text_completion"
    assert text.choices[0].finish_reason in ("stop", "length")
    assert text.usage is not None
    assert text.usage.total_tokens == text.usage.prompt_tokens + text.usage.completion_tokens
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=8, n=2, temperature=1
    )
    chat = answer.parse()
    assert [choice.message.role for choice in chat.choices] == ["assistant"] * 2
    assert chat.id.startswith("chatcmpl-")
    assert answer.request_id is not None


def test_a_chat_is_the_completion_of_its_rendered_prompt(client: openai.OpenAI) -> None:
    greedy: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    chat = client.chat.completions.create(messages=MESSAGES, **greedy)
    plain = client.completions.create(prompt="user: hello ", **greedy)
    assert plain.choices[0].text
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.choices[0].finish_reason == plain.choices[0].finish_reason
    assert chat.usage == plain.usage


def test_openais_client_reads_streams(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, **GREEDY)
    parts = list(client.completions.create(model=MODEL, stream=True, **GREEDY))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert parts[0].choices[0].logprobs == whole.choices[0].logprobs
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    chat = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0
    )
    said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(said) == chat.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage == chat.usage


def test_openais_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="hello", max_tokens=0)
    assert (bad.value.param, bad.value.code) == ("max_tokens", "invalid_value")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="hello " * 200)
    assert long.value.code == "context_length_exceeded"


def test_coheres_client_ranks(ranker: cohere.ClientV2) -> None:
    answer = ranker.rerank(model=MODEL, query="hello", documents=DOCUMENTS, top_n=3)
    scores = [result.relevance_score for result in answer.results]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)
    assert {result.index for result in answer.results} < set(range(len(DOCUMENTS)))
    assert answer.meta is not None
    assert answer.meta.tokens is not None
    assert answer.meta.tokens.input_tokens
    with pytest.raises(cohere.NotFoundError):
        ranker.rerank(model="rerank-v9", query="hello", documents=DOCUMENTS)


def test_langchains_reranker_orders_documents(ranker: cohere.ClientV2) -> None:
    given = [Document(text, metadata={"number": n}) for n, text in enumerate(DOCUMENTS)]
    reranker = CohereRerank(client=ranker, model=MODEL, top_n=2)
    found = reranker.compress_documents(given, "hello")
    direct = ranker.rerank(model=MODEL, query="hello", documents=DOCUMENTS, top_n=2)
    assert [one.metadata["number"] for one in found] == [one.index for one in direct.results]


def test_a_nightly_job_and_a_live_call_give_the_same_bits(deployment: Deployment) -> None:
    lines = [
        rerank_line("ranking", **RANKING),
        completion_line("greedy", **GREEDY),
        *(completion_line(f"other-{n}", prompt=f"{n}", max_tokens=20) for n in range(6)),
    ]
    ranking, greedy, *_ = outcomes(deployment, submit(deployment, lines))
    with httpx.Client(base_url=deployment.api_url, timeout=100, headers=KEY) as http:
        live = http.post("/v2/rerank", json=RANKING).json()
        assert live["results"] == ranking["results"]
        assert live["usage"] == ranking["usage"]
        text = http.post("/v1/completions", json=GREEDY).json()
        assert (text["choices"], text["usage"]) == (greedy["choices"], greedy["usage"])
        listed = http.get("/v1/jobs").json()["data"]
    assert all(one["counts"]["total"] == len(lines) for one in listed)


def test_a_call_overtakes_a_job_that_holds_every_thread(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    lines = [
        completion_line(f"{n}", prompt=f"{n}", max_tokens=100, ignore_eos=True) for n in range(640)
    ]
    job_id = submit(deployment, lines)
    wait_until("its first rows", lambda: job(deployment, job_id)["micro_batches"]["leased"])
    before = job(deployment, job_id)["micro_batches"]["done"]
    client.completions.create(model=MODEL, prompt="quick", max_tokens=1)
    after = job(deployment, job_id)
    assert after["finished_at"] is None
    assert after["micro_batches"]["done"] - before <= 2
    httpx.post(
        f"{deployment.api_url}/v1/jobs/{job_id}/cancel", timeout=60, headers=KEY
    ).raise_for_status()
    wait_until("its end", lambda: job(deployment, job_id)["finished_at"] is not None)


def test_a_call_whose_client_has_gone_is_cancelled_while_it_runs(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    store = Store(deployment.environment("api")["NIGHTJAR_DATABASE_URL"])
    cancelled = sa.select(table.c.id).where(table.c.live, table.c.state == JobState.CANCELLED)

    def found() -> list[str]:
        with store.database.reading() as connection:
            return list(connection.scalars(cancelled))

    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1.0).completions.create(
            model=MODEL,
            prompt="a",
            max_tokens=100,
            n=128,
            logprobs=20,
            extra_body={"ignore_eos": True},
        )
    wait_until("its end", found)
    store.close()
