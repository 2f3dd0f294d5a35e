"""A real deployment looked at from outside: metrics, dashboard, alerts, logs, Flower."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import yaml

from nightjar.jobs.store import Store
from nightjar.pipeline.front.top.reading import take
from nightjar.pipeline.metrics import declarations as declared
from tests.journeys import (
    CALL_TRACE,
    FLOWER_PASSWORD,
    JOB_TRACE,
    OWL,
    Journey,
    Span,
    assert_nothing_secret,
    journey_in,
    records,
    save_chat_model,
)
from tests.processes import nightjar_here, wait_until
from tests.scrapes import labels

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "monitoring"
DASHBOARD = json.loads((EXAMPLES / "grafana-dashboard.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def journey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Journey]:
    folder = tmp_path_factory.mktemp("monitored")
    model = save_chat_model(folder)
    url = f"sqlite:///{folder / 'n.db'}"
    yield from journey_in(folder, url, model, NIGHTJAR_LOG_FORMAT="json")


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


def test_the_files_are_what_prometheus_reads() -> None:
    """Their fields and times; where promtool is installed, it says the same."""
    scraping = yaml.safe_load((EXAMPLES / "prometheus.yaml").read_text(encoding="utf-8"))
    assert scraping["rule_files"] == ["alerts.yaml"]
    places = [place for job in scraping["scrape_configs"] for place in job["static_configs"]]
    hosts = {target.partition(":")[0] for place in places for target in place["targets"]}
    assert hosts == {"api", "planner", "gpu-worker", "beat"}
    times = re.compile(r"([1-9]\d*[smhd])+")
    exposed = {label for metric in declared.ALL for label in metric.labels}
    for group in ALERTS["groups"]:
        assert set(group) <= {"name", "interval", "rules"}
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
            assert times.fullmatch(rule.get("for", "1s")), rule["alert"]
            text = json.dumps(rule["annotations"])
            named = set(re.findall(r"\$labels\.(\w+)", text))
            assert named <= exposed | {"instance", "job"}, rule["alert"]
            assert text.count("{{") == text.count("}}") == len(re.findall(r"{{[^{}]+}}", text))
    if promtool := shutil.which("promtool"):
        for words in (["config", "--syntax-only", "prometheus.yaml"], ["rules", "alerts.yaml"]):
            subprocess.run([promtool, "check", *words], cwd=EXAMPLES, check=True, timeout=60)


def test_logs_are_json_and_name_job_micro_batch_and_worker(journey: Journey) -> None:
    seen: set[str] = set()
    for name in journey.system.ports:
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


def test_no_log_repeats_prompts_answers_or_keys(journey: Journey) -> None:
    assert_nothing_secret(journey)


def test_top_shows_the_deployment(journey: Journey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTJAR_DATABASE_URL", journey.system.database_url)
    store = Store(journey.system.database_url)
    (worker,) = take(store).workers
    store.close()
    done = nightjar_here("top", "--once")
    assert done.returncode == 0, done.stderr
    assert f"{worker.status['host']}:{worker.status['pid']}"[:28] in done.stdout
    assert "tiny" in done.stdout
    assert "planted" not in done.stdout


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
