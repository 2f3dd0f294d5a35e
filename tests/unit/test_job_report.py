"""Reports of jobs: tallies add up, every row is somewhere at every moment, pages are harmless."""

import base64
import hashlib
from html.parser import HTMLParser

import pytest

from nightjar.jobs.job_report import (
    TIME_BINS,
    FailureGroups,
    FailureReason,
    FailureSample,
    JobReport,
)
from nightjar.jobs.records import NewResult
from nightjar.jobs.report.page import ReportContext, render_report, report_json
from nightjar.jobs.report_builder import ReportBuilder
from nightjar.jobs.states import JobState, MicroBatchState, Reuse
from nightjar.jobs.tallies import (
    BIN_EDGES,
    ComputeCost,
    Tally,
    bin_of,
    dump_tally,
    load_tally,
    tally_of,
)
from nightjar.visible import visible
from tests.reported_jobs import at, built, job, micro_batch

NASTY = '<img src=x onerror=alert(1)>"\x1b[31m\u202e{{ 7*7 }}'


def test_a_tally_counts_what_landed_and_survives_storage() -> None:
    results = [
        NewResult(1, 200, {"recomputed_in": "fp32"}, None, 10, 4, 16, 12, "stop"),
        NewResult(2, 200, {}, None, 100, 16, 16, 0, "length"),
        NewResult(3, 200, {}, None, 70),  # a ranking
        NewResult(4, 200, {}, None, 9, 9, 9, 0, "stop", Reuse.CACHE),
        NewResult.failure(5, "invalid_value", "no"),
    ]
    cost = ComputeCost(1.5, 8.0, 40, 6, 2, "bf16", "1.0")
    tally = load_tally(dump_tally(tally_of(results, cost)))
    assert (tally.rows, tally.failed, tally.reused) == (5, 1, 1)
    assert (tally.prompt_tokens, tally.completion_tokens, tally.requested_tokens) == (180, 20, 32)
    assert (tally.saved_tokens, tally.cached_tokens, tally.pruned_tokens) == (12, 40, 6)
    assert tally.finish_reasons == {"stop": 1, "length": 1}
    assert tally.recomputed_in == {"fp32": 1}
    assert tally.prompts == {bin_of(10): 1, bin_of(100): 1, bin_of(70): 1}
    assert tally.generated == {bin_of(4): 1, bin_of(16): 1}
    assert (tally.precisions, tally.versions) == ({"bf16": 5}, {"1.0": 5})
    total = Tally()
    total.add(tally)
    total.add(tally)
    assert (total.rows, total.engine_s, total.prompts[bin_of(10)]) == (10, 3.0, 2)


@pytest.mark.parametrize("stored", [None, "", "no JSON", '{"rows": "many"}', "[]"])
def test_a_tally_that_cannot_be_read_is_empty(stored: str | None) -> None:
    assert load_tally(stored) == Tally()


def test_every_length_has_a_bin_and_buckets_begin_with_one() -> None:
    assert list(BIN_EDGES) == sorted(set(BIN_EDGES))
    for length in [*range(3_000), 131_072, 10**9]:
        index = bin_of(length)
        assert BIN_EDGES[index] <= length
        assert index + 1 == len(BIN_EDGES) or length < BIN_EDGES[index + 1]
    assert all(2**n in BIN_EDGES for n in range(25))


def test_every_row_stands_somewhere_at_every_moment() -> None:
    report = built(micro_batch(20, 20, 60), micro_batch(8, 50, 120))
    assert report.apart == 2  # two rows ended without being computed
    for index in range(TIME_BINS):
        parts = [report.queued, report.planned, report.computing, report.landed]
        assert sum(part[index] for part in parts) == pytest.approx(28)
    assert report.queued[5] == 28
    assert report.planned[15] == 28
    assert report.computing[30] == 20
    assert report.landed[-1] == 28
    assert report.lanes[0].rows == 28
    assert report.lease_s == pytest.approx(110)
    assert sum(report.landed_in_bin) == 28
    assert sum(report.tokens_in_bin) == 280
    assert report.padding_avoided == 28 * 22


def test_rows_of_a_split_micro_batch_are_counted_once() -> None:
    split = micro_batch(20, 20, 40, state=MicroBatchState.SPLIT, epoch=0, tally=Tally(rows=4))
    halves = [
        micro_batch(8, 60, 80, planned_at=at(40), isolated=True, crashes=2),
        micro_batch(8, 80, 120, planned_at=at(40), isolated=True, epoch=1, attempts=2),
    ]
    report = built(split, *halves, of=job(total=20, completed=20, failed=0))
    assert report.landed[-1] == 20
    assert report.apart == 0
    for index in range(TIME_BINS):
        parts = [report.queued, report.planned, report.computing, report.landed]
        assert sum(part[index] for part in parts) == pytest.approx(20)
    again = report.recomputed
    assert (again.split, again.suspects, again.crashes, again.retried) == (1, 16, 2, 1)
    assert (again.leases_taken_back, again.claims_again) == (1, 1)


def test_clocks_that_differ_and_rows_without_moments_break_nothing() -> None:
    report = built(
        micro_batch(10, -50, 900),
        micro_batch(10, 60, 40),
        micro_batch(8, 1, 2, planned_at=None, leased_at=None, ended_at=None),
    )
    assert report.untimed == 1
    assert report.tally.rows == 28
    assert all(value >= 0 for value in (*report.queued, *report.planned, *report.computing))


class Page(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.policy = ""
        self.style = ""
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self._in_style = tag == "style"
        given = dict(attrs)
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.style += data
        self._in_style = False


def nasty_report() -> JobReport:
    reason = FailureReason(NASTY, 2, [FailureSample(7, NASTY, NASTY, NASTY)])
    builder = ReportBuilder(job(model=NASTY, metadata={"schedule": NASTY}), at(200))
    tally = Tally(rows=4, prompts={3: 4}, finish_reasons={NASTY: 4}, precisions={NASTY: 4})
    builder.add(micro_batch(4, 30, 50, tally=tally, fingerprint=NASTY))
    return builder.built(FailureGroups([reason], 2, complete=False), complete=False)


def test_text_of_others_is_harmless_in_a_page() -> None:
    text = render_report(nasty_report(), ReportContext(NASTY, {NASTY: NASTY}))
    page = Page()
    page.feed(text)
    assert page.tags & {"script", "img", "iframe", "link", "a", "form", "object"} == set()
    assert not {name for name in page.attributes if name.startswith("on")}
    assert page.attributes & {"src", "href", "style"} == set()
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "{{ 7*7 }}" in text
    assert r"\x1b[31m\u202e" in text
    assert "https://" not in text
    assert "http://" not in text


def test_a_page_allows_its_own_style_sheet_and_nothing_else() -> None:
    page = Page()
    page.feed(render_report(built(micro_batch(28, 20, 120)), ReportContext("in.jsonl")))
    digest = base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode()
    assert page.policy == (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def test_a_job_of_which_nothing_was_computed_has_a_page() -> None:
    report = built(of=job(started_at=None, completed=0, failed=30, state=JobState.FAILED))
    assert "No row was computed." in render_report(report, ReportContext("x"))
    assert report_json(report, ReportContext("x"))["bill"]["rows_not_computed"] == 30


def test_a_running_job_has_a_report() -> None:
    running = job(finished_at=None, completed=10, failed=0, state=JobState.RUNNING)
    open_one = micro_batch(10, 30, 0, ended_at=None, state=MicroBatchState.LEASED, tally=Tally())
    report = built(micro_batch(10, 20, 60), open_one, of=running)
    assert report.computing[-1] == 10
    assert report.landed[-1] == 10
    assert report.queued[-1] == 10
    assert "not over when this was written" in render_report(report, ReportContext("x"))


def test_visible_text_keeps_words_and_shows_what_is_hidden() -> None:
    assert visible("안녕 <b>") == "안녕 <b>"
    assert visible("a\x1b[0m\u202eb\u200f\n") == r"a\x1b[0m\u202eb\u200f\x0a"
    assert visible("x" * 500, 10) == "x" * 10 + "…"
