"""Reports are read from micro-batches and failures, page by page, on both databases."""

from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from sqlalchemy.dialects import sqlite
from typer.testing import CliRunner

from nightjar.jobs.api import create_app
from nightjar.jobs.errors import UnknownJobError
from nightjar.jobs.records import NewJob, NewResult, RejectedRow
from nightjar.jobs.store import Store, reports
from nightjar.jobs.tallies import ComputeCost
from nightjar.pipeline.front.cli import app
from tests.jobs import planned
from tests.outcomes import answers, claim, compute


def test_a_report_holds_what_was_computed(store: Store) -> None:
    job_id, (first, second) = planned(store, 4, each=2)
    claimed = claim(store, first)
    cost = ComputeCost(0.5, 12.0, 3, 0, 0, "fp32", "1.0")
    assert store.leases.finish(first.id, 0, "worker", answers(claimed), cost=cost)
    assert claim(store, second)
    assert store.leases.give_back(second.id, 0, "worker")
    running = store.reports.of_job(job_id)
    assert (running.tally.rows, running.recomputed.leases_taken_back) == (2, 1)
    again = store.leases.claim(second.id, 1, "worker")
    assert again is not None
    assert store.leases.finish(second.id, 1, "worker", answers(again), cost=cost)
    report = store.reports.of_job(job_id)
    job = report.job
    assert (report.tally.rows, report.tally.engine_s, report.tally.cached_tokens) == (4, 1.0, 6)
    assert report.tally.prompt_tokens == job.prompt_tokens == 12
    assert report.tally.completion_tokens == job.completion_tokens
    assert report.tally.saved_tokens == job.saved_tokens
    assert report.recomputed.claims_again == 1
    assert (report.complete, report.untimed, report.apart) == (True, 0, 0)
    assert report.landed[-1] == 4
    assert [lane.rows for lane in report.lanes] == [4]
    assert report.lease_s > 0


def test_failures_are_grouped_with_some_rows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.jobs.submit(NewJob("tiny")) as submission:
        submission.add(
            RejectedRow(n, n + 1, f"row-{n}", "late" if n % 4 else "bad", f"line {n + 1}", "body")
            for n in range(10)
        )
    found = store.reports.of_job(submission.job_id).failures
    assert [(reason.code, reason.count) for reason in found.reasons] == [("late", 7), ("bad", 3)]
    assert [sample.line for sample in found.reasons[0].samples] == [2, 3, 4]
    assert found.reasons[1].samples[0].custom_id == "row-0"
    assert (found.counted, found.complete) == (10, True)
    monkeypatch.setattr(reports, "MOST_REASONS", 1)
    other = store.reports.of_job(submission.job_id).failures
    assert [(reason.code, reason.count) for reason in other.reasons] == [("other", 7), ("bad", 3)]


def test_a_bound_on_micro_batches_is_told(store: Store) -> None:
    job_id, refs = planned(store, 4, each=1)
    assert all(compute(store, ref) for ref in refs)
    part = store.reports.of_job(job_id, most_micro_batches=3)
    assert (part.complete, part.tally.rows) == (False, 3)
    assert store.reports.of_job(job_id, most_micro_batches=4).complete


def test_an_unknown_job_has_no_report(store: Store) -> None:
    with pytest.raises(UnknownJobError):
        store.reports.of_job("job_nobodys")


@pytest.mark.parametrize("statement", [reports.BEHIND, reports.FAILED], ids=["rows", "failures"])
def test_the_pages_of_a_report_walk_an_index(
    sqlite_tables: str, statement: sa.Select[object]
) -> None:
    text = str(statement.compile(dialect=sqlite.dialect()))
    with closing(Store(sqlite_tables)) as store, store.database.reading() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", (1,) * text.count("?"))
        steps = " ".join(row[-1] for row in plan)
    assert "USING INDEX" in steps
    assert "TEMP B-TREE" not in steps
    assert "SCAN" not in steps


def test_the_api_and_the_command_give_reports(
    sqlite_tables: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Store(sqlite_tables)) as store:
        job_id, refs = planned(store, 2, each=2)
        failed = [
            NewResult.failure(request.id, "invalid_value", "<b>\x1b[31m no")
            for request in claim(store, refs[0]).requests
        ]
        assert store.leases.finish(refs[0].id, 0, "worker", failed)
    monkeypatch.setenv("NIGHTJAR_DATABASE_URL", sqlite_tables)
    with closing(Store(sqlite_tables)) as store:
        client = TestClient(create_app(store, lambda job_id: None))
        told = client.get(f"/v1/jobs/{job_id}/report").json()
        page = client.get(f"/v1/jobs/{job_id}/report.html")
        assert client.get("/v1/jobs/job_nobodys/report").status_code == 404
    assert told["job"]["failed"] == 2
    assert told["failures"]["reasons"][0]["code"] == "invalid_value"
    assert page.headers["content-type"].startswith("text/html")
    assert "sandbox" in page.headers["content-security-policy"]
    assert "<b>\x1b" not in page.text
    out = tmp_path / "report.html"
    command = ["report", job_id, "--database", "--out", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert r"&lt;b&gt;\x1b[31m no" in out.read_text(encoding="utf-8")
    missing = CliRunner().invoke(app, ["report", "job_nobodys", "--database"])
    assert missing.exit_code == 1
    assert "job_nobodys" in missing.stderr
    nowhere = CliRunner().invoke(app, ["report", f"{tmp_path}/no/such"])
    assert nowhere.exit_code == 2
