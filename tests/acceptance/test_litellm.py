"""LiteLLM as a proxy in front of a deployment: files, batches, calls and rerank go through it.

LiteLLM pins an older `openai` than the tests use, so it lives in an environment of its own:
`make test-litellm` makes it and sets NIGHTJAR_TEST_LITELLM to its program.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import yaml

from tests.databases import fresh_postgres_database
from tests.models import save_gpt2
from tests.processes import completion_line, wait_until
from tests.services import VARIABLES, free_port, running_deployment

LITELLM = os.environ.get("NIGHTJAR_TEST_LITELLM", "")
KEY = "sk-of-the-proxy"
OURS = VARIABLES["API_KEY"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LITELLM, reason="make test-litellm installs LiteLLM"),
]


@pytest.fixture(scope="module")
def proxy(postgres_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a LiteLLM proxy in front of a deployment with a real model."""
    directory = tmp_path_factory.mktemp("litellm")
    model = save_gpt2(directory / "demo")
    with (
        fresh_postgres_database(postgres_server) as url,
        running_deployment(directory, url, model) as running,
    ):
        running.start_broker()
        running.run_migration()
        for name in ("api", "planner", "gpu-worker"):
            running.services[name].start()
        running.wait_for_api()
        with litellm(directory, running.api_url) as proxy_url:
            yield proxy_url


class litellm:  # noqa: N801 - used as a function
    """A LiteLLM proxy in front of an API, within a `with` block."""

    def __init__(self, directory: Path, api_url: str) -> None:
        ours = {"api_base": f"{api_url}/v1", "api_key": OURS}
        config = {
            "model_list": [
                {"model_name": "demo", "litellm_params": {"model": "openai/demo", **ours}},
                {
                    "model_name": "demo-rerank",
                    "litellm_params": {
                        "model": "cohere/demo",
                        "api_base": api_url,
                        "api_key": OURS,
                    },
                },
            ],
            "files_settings": [{"custom_llm_provider": "openai", **ours}],
            "general_settings": {"master_key": KEY},
        }
        path = directory / "litellm.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        self._port = free_port()
        self._command = [LITELLM, "--config", str(path), "--port", str(self._port)]
        self._log = directory / "litellm.log"

    def __enter__(self) -> str:
        environment = {
            **os.environ,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the internet
            "OPENAI_API_KEY": OURS,
        }
        url = f"http://127.0.0.1:{self._port}"
        with self._log.open("wb") as log:
            self._process = psutil.Popen(self._command, env=environment, stdout=log, stderr=log)
        wait_until("LiteLLM", lambda: is_ready(url), 180)
        return url

    def __exit__(self, *exception: object) -> None:
        for process in [*self._process.children(recursive=True), self._process]:
            process.kill()
        self._process.wait(30)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/liveliness", timeout=5).is_success
    except httpx.TransportError:
        return False


@pytest.fixture
def client(proxy: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{proxy}/v1", api_key=KEY, timeout=120) as opened:
        wait_until("an answer", lambda: is_answered(opened), 240)
        yield opened


def is_answered(client: openai.OpenAI) -> bool:
    try:
        client.completions.create(model="demo", prompt="a", max_tokens=1)
    except (openai.APIStatusError, openai.APITimeoutError):
        return False
    return True


def test_calls_go_through(client: openai.OpenAI) -> None:
    done = client.completions.create(model="demo", prompt="hello", max_tokens=4, temperature=0)
    assert done.usage is not None
    assert done.usage.completion_tokens > 0
    parts = list(client.completions.create(model="demo", prompt="hello", max_tokens=4, stream=True))
    assert parts[-1].choices[0].finish_reason in ("stop", "length")


def test_rerank_goes_through(proxy: str) -> None:
    asked = {"model": "demo-rerank", "query": "hello", "documents": [" a", " hello"], "top_n": 1}
    answer = httpx.post(
        f"{proxy}/rerank", json=asked, headers={"Authorization": f"Bearer {KEY}"}, timeout=120
    )
    assert answer.status_code == 200, answer.text
    (best,) = answer.json()["results"]
    assert best["index"] in (0, 1)
    assert 0 <= best["relevance_score"] <= 1


def test_a_batch_goes_through(client: openai.OpenAI) -> None:
    provider = {"custom-llm-provider": "openai"}
    lines = [completion_line(f"row-{n}", prompt="a", max_tokens=2) for n in range(5)]
    content = "\n".join(map(json.dumps, lines)).encode()
    made = client.files.create(file=("in.jsonl", content), purpose="batch", extra_headers=provider)
    assert made.purpose == "batch"
    batch = client.batches.create(
        input_file_id=made.id,
        endpoint="/v1/completions",
        completion_window="24h",
        extra_headers=provider,
    )

    def is_over() -> bool:
        found = client.batches.retrieve(batch.id, extra_headers=provider)
        return found.status == "completed"

    wait_until("the batch", is_over, 120)
    found = client.batches.retrieve(batch.id, extra_headers=provider)
    assert found.output_file_id is not None
    output = client.files.content(found.output_file_id, extra_headers=provider).text
    ids = {json.loads(line)["custom_id"] for line in output.splitlines()}
    assert ids == {f"row-{n}" for n in range(5)}
