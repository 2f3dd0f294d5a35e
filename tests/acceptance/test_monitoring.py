"""A real deployment looked at from outside: metrics, dashboard, alerts, logs, Flower."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from nightjar.pipeline.metrics import declarations as declared
from tests.models import save_gpt2
from tests.monitored import COMMANDS, Monitored, monitored
from tests.processes import wait_until
from tests.receivers import Receiver, answer_status, receiving
from tests.scrapes import labels, scrape

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "monitoring"
DASHBOARD = json.loads((EXAMPLES / "grafana-dashboard.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text(encoding="utf-8"))
KEY = "planted-key-of-owls-0123456789-abcdef"
PLANTED = {
    name: f"planted-{name}-zebra"
    for name in (
        *("prompt", "chat", "system", "query", "document", "badline", "badcall", "header"),
        *("wrongkey", "querykey", "url", "metadata", "stop", "poison", "idempotency"),
    )
}
FLOWER_PASSWORD = "planted-hoot"
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


def journey_in(folder: Path, database_url: str, model: Path, **settings: str) -> Iterator[Journey]:
    with (
        receiving(answer_status(500, PLANTED["url"].encode())) as receiver,
        receiving() as collector,
        monitored(
            database_url,
            model,
            folder,
            KEY,
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


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template."""
    model = save_gpt2(tmp_path_factory.mktemp("models") / "tiny")
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    return model


@pytest.fixture(scope="module")
def journey(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Journey]:
    folder = tmp_path_factory.mktemp("monitored")
    yield from journey_in(
        folder, f"sqlite:///{folder / 'n.db'}", chat_model, NIGHTJAR_LOG_FORMAT="json"
    )


OWL = labels(model="tiny")


def test_every_declared_metric_is_exposed_by_its_processes_alone(journey: Journey) -> None:
    kinds = {"api": {declared.API, declared.UPLOADS}}
    for name, found in journey.scrapes.items():
        of_name = kinds.get(name, {name})
        wanted = [metric for metric in declared.ALL if of_name & set(metric.processes)]
        shown = {series for series in found if series.startswith("nightjar_")}
        for metric in wanted:
            ending = "_count" if metric.kind == "histogram" else ""
            assert f"{metric.series}{ending}" in shown, (name, metric.name)
        known = {
            f"{metric.series}{ending}"
            for metric in wanted
            for ending in (("_count", "_sum", "_bucket") if metric.kind == "histogram" else ("",))
        }
        assert shown <= known, name
        assert {"process_cpu_seconds_total", "process_resident_memory_bytes"} <= set(found)


def test_rows_are_counted_once_over_all_processes(journey: Journey) -> None:
    """24 rows of the job were not rejected; 3 single calls succeeded."""
    totals = dict.fromkeys(("completed", "failed", "cancelled"), 0.0)
    for found in journey.scrapes.values():
        for key, value in found.get("nightjar_rows_total", {}).items():
            totals[dict(key)["outcome"]] += value
    assert totals == {"completed": 22 + 3, "failed": 2, "cancelled": 0}


def test_the_worker_tells_of_its_engine_and_its_micro_batches(journey: Journey) -> None:
    found = journey.scrapes["gpu-worker"]
    assert found["nightjar_compute_process_ends_total"][OWL] >= 1
    assert found["nightjar_suspect_requests_total"][labels()] >= 1
    assert found["nightjar_micro_batches_total"][labels(outcome="crashed")] >= 1
    assert found["nightjar_prefill_tokens_total"][OWL] > 0
    done = found["nightjar_micro_batches_total"][labels(outcome="done")]
    assert sum(found["nightjar_computed_micro_batches_total"].values()) == done
    for operation in ("claim", "compute", "finish"):
        key = labels(operation=operation)
        assert found["nightjar_operation_seconds_count"][key] >= done


def test_the_planner_leads_and_dispatches(journey: Journey) -> None:
    found = journey.scrapes["planner"]
    assert found["nightjar_planner_leads"] == {labels(): 1}
    assert found["nightjar_planned_requests_total"][labels()] >= 24
    assert found["nightjar_dispatched_micro_batches_total"][labels()] >= 3
    assert journey.scrapes["beat"]["nightjar_ticks_total"][labels()] >= 1


def test_the_api_tells_of_its_upload_process_too(journey: Journey) -> None:
    found = journey.scrapes["api"]
    processes = {dict(key)["process"] for key in found["nightjar_build_info"]}
    assert processes == {"api", "uploads"}
    assert {dict(key)["process"] for key in found["process_resident_memory_bytes"]} == processes
    sent = labels(route="/v1/jobs", status="2xx")
    assert found["nightjar_upload_seconds_count"][sent] == 1
    http = labels(method="POST", route="/v1/jobs", status="2xx")
    assert found["nightjar_http_request_seconds_count"][http] == 1


def test_no_label_holds_an_id_or_a_secret(journey: Journey) -> None:
    for name, found in journey.scrapes.items():
        text = json.dumps([sorted(key) for series in found.values() for key in series])
        assert "row-" not in text, name
        assert journey.job_id not in text
        assert "planted" not in text


def expressions() -> dict[str, str]:
    """Every expression of the dashboard and of the alerts, by its title."""
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    }
    found |= {rule["alert"]: rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]}
    return {name: text.replace("$__rate_interval", "5m") for name, text in found.items()}


def selectors(node: Any) -> Iterator[Any]:
    """Yield every selector below a node of an expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "vs"):
        inner = getattr(node, name, None)
        if isinstance(inner, promql_parser.Expr | promql_parser.VectorSelector):
            yield from selectors(inner)
    for inner in getattr(node, "args", None) or ():
        yield from selectors(inner)


def grouped(text: str) -> set[str]:
    """The labels by which an expression groups."""
    return {
        label.strip()
        for found in re.findall(r"\bby \(([^)]*)\)", text)
        for label in found.split(",")
    }


@pytest.mark.parametrize("name", sorted(expressions()))
def test_the_dashboard_and_the_alerts_read_what_is_really_exposed(
    journey: Journey, name: str
) -> None:
    text = expressions()[name]
    read = list(selectors(promql_parser.parse(text)))
    assert read
    exposed: set[str] = set()
    for selector in read:
        samples = [
            found[selector.name] for found in journey.scrapes.values() if selector.name in found
        ]
        declared_labels = {
            label
            for metric in declared.ALL
            if selector.name.startswith(metric.series)
            for label in (*metric.labels, "le")
        }
        series = {key for found in samples for key in found}
        real = {label for key in series for label, _ in key} or declared_labels
        assert samples, selector.name
        exposed |= real
        for matcher in selector.matchers.matchers:
            assert matcher.name in real, matcher.name
    assert grouped(text) <= exposed


def test_each_alert_says_what_to_do_and_has_its_part_in_the_guide() -> None:
    guide = (ROOT / "docs" / "guides" / "monitoring.md").read_text(encoding="utf-8")
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len(rules) >= 10
    for rule in rules:
        assert len(rule["annotations"]["action"]) > 20
        assert f"### {rule['alert']}" in guide


def records(text: str) -> list[dict[str, Any]]:
    lines = text.splitlines()
    assert [line for line in lines if not line.startswith("{")] == []
    return [json.loads(line) for line in lines]


def test_logs_are_json_and_name_job_micro_batch_and_worker(journey: Journey) -> None:
    seen: set[str] = set()
    for name in COMMANDS:
        written = records(journey.system.log(name))
        assert written, name
        seen |= {one["process"] for one in written}
        assert all({"time", "level", "logger", "message", "pid"} <= set(one) for one in written)
    assert {"api", "planner", "gpu-worker", "beat", "compute", "flower"} <= seen
    claims = [
        one for one in records(journey.system.log("gpu-worker")) if one.get("action") == "claim"
    ]
    of_job = [one for one in claims if one["job_id"] == journey.job_id]
    assert of_job
    assert all(one["micro_batch"] and ":" in one["worker"] for one in of_job)


def assert_nothing_secret(journey: Journey) -> None:
    for name in (*COMMANDS, "broker"):
        text = journey.system.log(name)
        shown = [secret for secret in PLANTED.values() if secret in text]
        assert shown == [], name
        assert KEY not in text, name
        assert "planted" not in text, name
        assert [one for one in (*journey.answers, *journey.secrets) if one in text] == [], name


def test_no_log_repeats_prompts_answers_or_keys(journey: Journey) -> None:
    assert_nothing_secret(journey)


@pytest.mark.slow
def test_no_log_for_people_repeats_them_either(
    chat_model: Path, tmp_path: Path, postgres_url: str
) -> None:
    for journey in journey_in(tmp_path, postgres_url, chat_model, NIGHTJAR_LOG_FORMAT="text"):
        assert_nothing_secret(journey)
        assert f"job_id={journey.job_id}" in journey.system.log("gpu-worker")


def test_flower_names_micro_batches_and_their_outcomes(journey: Journey) -> None:
    url = f"http://127.0.0.1:{journey.system.ports['flower']}"
    assert httpx.get(f"{url}/api/tasks", timeout=30).status_code == 401
    login = "owl", FLOWER_PASSWORD
    answer = httpx.get(f"{url}/api/tasks?limit=1000", auth=login, timeout=30)
    tasks = answer.raise_for_status().json().values()
    assert {task["name"] for task in tasks} <= {
        f"{kind}, bucket {bucket}{note}"
        for kind in ("generate", "rank")
        for bucket in (32, 64, 128)
        for note in ("", ", live", ", suspects")
    }
    ours = [task for task in tasks if f"job={journey.job_id}" in str(task["kwargs"])]
    assert len(ours) >= 3
    for part in ("micro_batch=", "epoch=", "kind=", "bucket=", "requests=", "tokens="):
        assert all(part in task["kwargs"] for task in ours)
    results = " ".join(str(task["result"]) for task in ours)
    for part in ("'outcome': 'done'", "prompt_tokens", "completion_tokens", "failed"):
        assert part in results
    assert "planted" not in str(list(tasks))


def of_trace(journey: Journey, trace: str, *wanted: str) -> list[Span]:
    """The spans of a trace, once those with the wanted names have come."""

    def found() -> list[Span]:
        return [span for span in journey.spans() if span.trace == trace]

    wait_until("the spans", lambda: {span.name for span in found()} >= set(wanted), 30)
    return found()


@pytest.mark.slow
def test_one_trace_goes_from_the_upload_to_the_landed_rows(journey: Journey) -> None:
    spans = of_trace(journey, JOB_TRACE, "POST /v1/jobs", "plan", "micro-batch", "finish")
    by_id = {span.id: span for span in spans}
    parents = {
        (span.process, span.name, by_id[span.parent].process if span.parent in by_id else "caller")
        for span in spans
    }
    assert {
        ("nightjar-api", "POST /v1/jobs", "caller"),
        ("nightjar-uploads", "POST /v1/jobs", "nightjar-api"),
        ("nightjar-planner", "plan", "nightjar-uploads"),
        ("nightjar-gpu-worker", "micro-batch", "nightjar-uploads"),
        ("nightjar-gpu-worker", "claim", "nightjar-gpu-worker"),
        ("nightjar-gpu-worker", "compute", "nightjar-gpu-worker"),
        ("nightjar-gpu-worker", "finish", "nightjar-gpu-worker"),
    } <= parents


@pytest.mark.slow
def test_a_single_call_is_traced_to_its_worker(journey: Journey) -> None:
    spans = of_trace(journey, CALL_TRACE, "POST /v1/completions", "micro-batch", "finish")
    (call,) = [span for span in spans if span.name == "POST /v1/completions"]
    worked = [span for span in spans if span.name == "micro-batch" and span.parent == call.id]
    assert {span.process for span in worked} == {"nightjar-gpu-worker"}  # twice, if sent twice


@pytest.mark.slow
def test_only_sampled_traces_are_sent_and_none_repeats_a_request(journey: Journey) -> None:
    """Of what no caller asked to trace, one in a million would be."""
    of_trace(journey, JOB_TRACE, "finish")
    assert {span.trace for span in journey.spans()} == {JOB_TRACE, CALL_TRACE}
    text = str(journey.spans())
    assert "planted" not in text
    assert [answer for answer in journey.answers if answer in text] == []
