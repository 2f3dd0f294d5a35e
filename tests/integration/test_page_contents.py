"""What each page shows of a deployment with jobs in every state."""

import html
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from nightjar.jobs.store import Store
from tests.api_app import real_app
from tests.shown_deployment import Shown, fill
from tests.shown_jobs import BUCKETS, WORKER

WIDTH = re.compile(r'class="done" width="([\d.]+)%"')


@dataclass(frozen=True)
class Pages:
    """The jobs, and what a page holds: its HTML, and its words alone."""

    jobs: Shown
    source: Callable[[str], str]

    def words(self, path: str) -> str:
        text = re.sub(r"<script.*?</script>", " ", self.source(path), flags=re.DOTALL)
        return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())

    def charts(self, path: str) -> dict[str, dict[str, object]]:
        """The data of each chart by its name."""
        found = re.findall(
            r'data-chart="(\w+)".*?<script type="application/json">(.*?)</script>',
            self.source(path),
            re.DOTALL,
        )
        return {name: json.loads(data) for name, data in found}


@pytest.fixture(scope="module")
def pages(migrated_sqlite_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    path = tmp_path_factory.mktemp("shown") / "shown.db"
    shutil.copy(migrated_sqlite_file, path)
    store = Store(f"sqlite:///{path}")
    jobs = fill(store)
    with TestClient(real_app(store), base_url="http://127.0.0.1") as client:

        def source(path: str) -> str:
            answer = client.get(f"/ui{path}")
            assert answer.status_code == 200, (path, answer.text[:300])
            return answer.text

        yield Pages(jobs, source)
    store.close()


def test_the_list_shows_how_far_each_job_is(pages: Pages) -> None:
    source = pages.source("/")
    states = ("Running", "With failures", "Completed", "Paused", "Queued", "Cancelled")
    for name, state in zip(
        ("running", "failed", "ranked", "paused", "queued", "cancelled"), states, strict=True
    ):
        job_id = getattr(pages.jobs, name)
        row = source.partition(f'id="row-{job_id}"')[2].partition("</tr>")[0]
        assert f">{state}</span>" in row, name
    words = pages.words("/")
    assert re.search(r"[\d,]+ / 2,400", words)
    assert "200 / 200" in words
    assert re.search(r"\d/(s|min|h)\b", words)


def test_a_job_has_a_timeline_and_its_rows_by_stage_kind_and_bucket(pages: Pages) -> None:
    words = pages.words(f"/jobs/{pages.jobs.running}")
    for told in ("Rate", "Time left", "Timeline", "Submitted", "First claim", "Rows by stage"):
        assert told in words, told
    stages = {
        name: int(found.replace(",", ""))
        for name, found in re.findall(r"(Queued|Planned|Computing|Landed) ([\d,]+)", words)
    }
    assert sum(stages.values()) == 2_400
    assert min(stages.values()) > 0
    table = words.partition("By kind and bucket")[2]
    assert [int(found.replace(",", "")) for found in re.findall(r"generate ≤ ([\d,]+)", table)] == [
        *BUCKETS
    ]


def test_the_charts_hold_what_the_rows_say(pages: Pages) -> None:
    found = pages.charts(f"/jobs/{pages.jobs.running}/figures")
    assert set(found) == {"speed", "lengths", "prompts"}
    lengths = found["lengths"]
    requested, generated = lengths["requested"], lengths["generated"]
    assert isinstance(requested, list)
    assert isinstance(generated, list)
    assert sum(requested) == sum(generated) > 100
    means = lengths["mean_requested"], lengths["mean_generated"]
    assert means[0] > 4 * means[1]  # type: ignore[operator]  # numbers: people ask for far more
    assert lengths["buckets"] == [*BUCKETS]
    ranked = pages.charts(f"/jobs/{pages.jobs.ranked}/figures")
    assert set(ranked) == {"speed", "prompts"}  # a ranking generates nothing


def test_rankings_are_bars_and_the_best_is_the_longest(pages: Pages) -> None:
    source = pages.source(f"/jobs/{pages.jobs.ranked}/results")
    lists = re.findall(r'<ol class="ranking">(.*?)</ol>', source, re.DOTALL)
    assert len(lists) == 20
    for one in lists:
        widths = [float(width) for width in WIDTH.findall(one)]
        assert len(widths) == 6
        assert widths == sorted(widths, reverse=True)
        assert widths[0] > 2 * widths[-1] > 0
    assert "된장찌개야" in lists[0]
    assert "3.82" in lists[0]


def test_answers_in_json_are_a_table(pages: Pages) -> None:
    source = pages.source(f"/jobs/{pages.jobs.judged}/results")
    table = source.partition('<table class="answers">')[2].partition("</table>")[0]
    columns = re.findall(r'<th scope="col"><bdi>(\w+)</bdi>', table)
    assert columns == ["sentiment", "topic", "stars"]
    assert table.count("<tr>") == 21
    assert set(re.findall(r"positive|negative|mixed", table)) == {"positive", "negative", "mixed"}


def test_failures_stand_by_reason_with_their_rows(pages: Pages) -> None:
    words = pages.words(f"/jobs/{pages.jobs.failed}/failures")
    assert words.index("context_exceeded") < words.index("compute_crashed")  # the more frequent
    assert "the model takes 2,048 together" in words
    assert "row-0" in words


def test_a_worker_shows_what_it_computes_its_batch_and_its_cache(pages: Pages) -> None:
    words = pages.words("/workers")
    for told in (
        WORKER,
        "hyperclova-6.9b",
        "cuda:0 · fp16",
        "61 / 64",
        "70.1%",
        "12.5%",
        "14 requests",
    ):
        assert told in words, told
    assert pages.jobs.running in words
    assert "Computing" in words


def test_queues_show_depth_and_age(pages: Pages) -> None:
    source, words = pages.source("/queues"), pages.words("/queues")
    rows = source.partition("<tbody>")[2].count('<tr><th scope="row">')
    assert rows == source.count('data-name="Oldest job"') > 2
    assert re.search(r'data-name="Oldest job">\d', source)
    assert "hyperclova-6.9b" in words


def test_schedules_show_their_last_and_their_next_run(pages: Pages) -> None:
    words = pages.words("/schedules")
    assert {"Succeeded", "Failing", "Paused"} <= set(words.split())
    assert re.search(r"\bin \d+", words)
    runs = pages.words(f"/schedules/{pages.jobs.schedule}")
    assert "Asia/Seoul" in runs
    assert re.search(r"48,\d\d\d|4[89],\d\d\d", runs)


def test_tenants_show_their_shares_and_weights(pages: Pages) -> None:
    source, words = pages.source("/tenants"), pages.words("/tenants")
    tables = re.findall(r'<table class="shares">(.*?)</table>', source, re.DOTALL)
    assert len(tables) == 2
    for one in tables:
        widths = [float(width) for width in WIDTH.findall(one)]
        assert widths[0] == 100
        assert widths == sorted(widths, reverse=True)
    shares = [float(found) for found in re.findall(r"([\d.]+)%", words)]
    assert sum(shares) == pytest.approx(100 * len(tables), abs=0.3)
    assert re.search(r"search [\d.,]+ ?\w? [\d.]+% 2\b", words)
