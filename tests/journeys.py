"""All kinds of calls through a real deployment, each with a secret in it, and what came of them."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.models import save_gpt2
from tests.monitored import PARTS, Monitored, monitored
from tests.processes import wait_until
from tests.receivers import Receiver, answer_status, receiving
from tests.scrapes import labels, scrape

KEY = "planted-key-of-owls-0123456789-abcdef"
PLANTED = {
    name: f"planted-{name}-zebra"
    for name in (
        *("prompt", "chat", "system", "query", "document", "badline", "badcall", "header"),
        *("wrongkey", "querykey", "url", "metadata", "stop", "poison", "idempotency"),
    )
}
FLOWER_PASSWORD = "planted-hoot"
BROKER_PASSWORD = "planted-broker-word"
DATABASE_PASSWORD = "planted-database-word"
JOB_TRACE, CALL_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736", "0af7651916cd43dd8448eb211c80319c"
WORKERS = ("planner", "gpu-worker", "beat")


@dataclass(frozen=True)
class Span:
    """A span as the collector got it."""

    trace: str
    id: str
    parent: str
    name: str
    process: str
    attributes: str


def spans_in(collector: Receiver) -> list[Span]:
    """Every span that was sent."""
    found = []
    for body in collector.bodies():
        for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {one.key: one.value.string_value for one in sent.resource.attributes}
            found += [
                Span(
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name,
                    named["service.name"],
                    str(span.attributes) + str(span.events) + str(span.status),
                )
                for scope in sent.scope_spans
                for span in scope.spans
            ]
    return found


@dataclass
class Journey:
    """What was sent, and what came back."""

    system: Monitored
    job_id: str
    answers: list[str]
    secrets: list[str]
    scrapes: dict[str, dict[str, Any]]
    spans: Callable[[], list[Span]]


def lines() -> str:
    """Rows of every kind, and two that cannot be used."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        (
            "/v1/completions",
            {"prompt": f"{PLANTED['prompt']} {n}", "max_tokens": 12, "stop": [PLANTED["stop"]]},
        )
        for n in range(20)
    ]
    messages = [
        {"role": "system", "content": PLANTED["system"]},
        {"role": "user", "content": PLANTED["chat"]},
    ]
    documents = [PLANTED["document"], "another document"]
    bodies += [
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 12}),
        ("/v1/rerank", {"query": PLANTED["query"], "documents": documents, "top_n": 1}),
        ("/v1/completions", {"prompt": f"<poison:raise> {PLANTED['poison']}", "max_tokens": 4}),
        ("/v1/completions", {"prompt": f"<poison:crash> {PLANTED['poison']}", "max_tokens": 4}),
        ("/v1/completions", {"prompt": PLANTED["badline"], "max_tokens": PLANTED["badline"]}),
    ]
    rows = [
        json.dumps({"custom_id": f"row-{n}", "method": "POST", "url": url, "body": body})
        for n, (url, body) in enumerate(bodies)
    ]
    return "\n".join([*rows, f'{{"custom_id": "broken {PLANTED["badline"]}'])


def strangers(system: Monitored) -> None:
    """Calls that are refused, each with a secret in another place."""
    url = f"http://127.0.0.1:{system.ports['api']}"
    wrong = {"authorization": f"Bearer {PLANTED['wrongkey']}", "x-secret": PLANTED["header"]}
    assert httpx.get(f"{url}/v1/jobs", headers=wrong).status_code == 401
    assert httpx.get(f"{url}/metrics", headers=wrong).status_code == 401
    assert httpx.get(f"{url}/v1/jobs?api_key={PLANTED['querykey']}").status_code == 400
    with system.client as client:
        bad = client.post("/v1/completions", json={"prompt": {"a": PLANTED["badcall"]}})
        assert bad.status_code == 400
        broken = client.post("/v1/chat/completions", content=f'{{"messages": "{PLANTED["badcall"]}')
        assert broken.status_code == 400


def travel(system: Monitored, hook: str) -> tuple[str, list[str], list[str]]:
    """Send all that may be sent; return the job, the answers and what else is secret."""
    strangers(system)
    answers: list[str] = []
    with system.client as client:
        made = client.post("/v1/webhooks", json={"url": f"{hook}&token={PLANTED['url']}"})
        assert made.status_code == 201, made.text
        secret = made.json()["secret"]
        headers = {
            "content-type": "application/jsonl",
            "idempotency-key": PLANTED["idempotency"],
            "traceparent": f"00-{JOB_TRACE}-00f067aa0ba902b7-01",
            "x-secret": PLANTED["header"],
        }
        sent = client.post("/v1/jobs", content=lines(), headers=headers)
        assert sent.status_code < 300, sent.text
        job_id = sent.json()["id"]
        for path, body in (
            ("/v1/completions", {"prompt": PLANTED["prompt"], "max_tokens": 12}),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": PLANTED["chat"]}], "max_tokens": 12},
            ),
            ("/v1/rerank", {"query": PLANTED["query"], "documents": [PLANTED["document"]]}),
        ):
            traced = {"traceparent": f"00-{CALL_TRACE}-00f067aa0ba902b7-01"}
            answer = client.post(path, json=body, headers=traced)
            assert answer.status_code == 200, answer.text
            answers.append(answer.text)

        def is_over() -> bool:
            state: str = client.get(f"/v1/jobs/{job_id}").json()["state"]
            return state == "completed_with_failures"

        wait_until("the end of the job", is_over, 60)
        answers.append(client.get(f"/v1/jobs/{job_id}/output").text)
    texts = re.findall(r'"(?:text|content)": ?"((?:[^"\\]|\\.){12,})"', "\n".join(answers))
    assert len(texts) > 5
    return job_id, texts, [secret]


def while_work_waits(system: Monitored) -> dict[str, dict[Any, float]]:
    """The metrics of queues; an empty queue has none."""
    row = '{"custom_id": "w-%d", "method": "POST", "url": "/v1/completions", "body": %s}'
    body = json.dumps({"prompt": "wait", "max_tokens": 4})
    found: dict[str, dict[Any, float]] = {}
    with system.client as client:
        job = client.post("/v1/jobs", content="\n".join(row % (n, body) for n in range(2000)))

        def waits() -> bool:
            found.update(scrape(system.scrape("api")))
            return "nightjar_queue_micro_batches" in found

        wait_until("work in the queue", waits, 30)
        client.post(f"/v1/jobs/{job.json()['id']}/cancel").raise_for_status()
    return {name: series for name, series in found.items() if name.startswith("nightjar_queue")}


def journey_in(
    folder: Path,
    database_url: str,
    model: Path,
    parts: Sequence[str] = PARTS,
    **settings: str,
) -> Iterator[Journey]:
    """Start a deployment that writes everything it ever writes, and send all of it."""
    with (
        receiving(answer_status(500, PLANTED["url"].encode())) as receiver,
        receiving() as collector,
        monitored(
            database_url,
            model,
            folder,
            KEY,
            parts,
            BROKER_PASSWORD,
            NIGHTJAR_LOG_LEVEL="debug",
            NIGHTJAR_MESSAGE_KEY="planted-message-key-of-owls",
            NIGHTJAR_FAKE_STEP_S="0.3",
            NIGHTJAR_FLOWER_AUTH=f"owl:{FLOWER_PASSWORD}",
            NIGHTJAR_TRACE_SHARE="0.000001",
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{collector.port}",
            OTEL_BSP_SCHEDULE_DELAY="200",
            **settings,
        ) as system,
    ):
        job_id, answers, secrets = travel(system, receiver.url)
        wait_until("an event", lambda: receiver.received, 30)
        # The engine's last numbers come within a second.
        wait_until(
            "the engine's numbers",
            lambda: scrape(system.scrape("gpu-worker"))["nightjar_decode_tokens_total"][OWL] > 0,
            30,
        )
        scrapes = {name: scrape(system.scrape(name)) for name in ("api", *WORKERS)}
        scrapes["api"] |= while_work_waits(system)
        yield Journey(system, job_id, answers, secrets, scrapes, lambda: spans_in(collector))


OWL = labels(model="tiny")


def save_chat_model(folder: Path) -> Path:
    """The tiny model with a chat template."""
    model = save_gpt2(folder / "tiny")
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    return model


def records(text: str) -> list[dict[str, Any]]:
    lines = text.splitlines()
    assert [line for line in lines if not line.startswith("{")] == []
    return [json.loads(line) for line in lines]


def assert_nothing_secret(journey: Journey) -> None:
    """No log of any process repeats what was planted, an answer or a secret of a webhook."""
    for name in journey.system.services:
        text = journey.system.log(name)
        assert "planted" not in text, name
        assert [one for one in (*journey.answers, *journey.secrets) if one in text] == [], name
