"""Texts of strangers, and jobs that go while their page is open."""

import pytest
from playwright.sync_api import expect

from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.purge_records import PurgeScope
from nightjar.jobs.records import NewJob, NewRequest, NewResult
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from tests.browser.deployments import Site
from tests.browser.tabs import Tab
from tests.outcomes import claim
from tests.planned_models import ALPHA, plan
from tests.shown_jobs import Work, make, say, talk

MARKUP = "<img src=x onerror='pwned=1'><script>pwned=1</script>\"'><svg onload=pwned=1>"
TURNED = "invoice\u202egpj.exe"
ESCAPES = "\x1b[31mred\x1b]8;;http://evil.example\x07link\x00"
HOSTILE = f"{MARKUP}{TURNED}{ESCAPES}"
HARMFUL = "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u202a-\\u202e\\u2066-\\u2069]"


@pytest.fixture(scope="module")
def hostile_job(site: Site) -> str:
    """A job in which every text is hostile: a completion, a failure, a ranking, a JSON answer."""
    text = HOSTILE.replace("\x00", "")  # neither database holds it
    bodies = [
        (RequestKind.GENERATE, {"prompt": text, "max_tokens": 4}),
        (RequestKind.GENERATE, {"prompt": text, "max_tokens": 4}),
        (RequestKind.RANK, {"query": text, "documents": [text, "b"]}),
        (RequestKind.GENERATE, {"prompt": text, "max_tokens": 4}),
    ]
    rows = [
        NewRequest(n, n + 1, f"{text[:100]}{n}", kind, validate_body(kind, body))
        for n, (kind, body) in enumerate(bodies)
    ]
    new = NewJob(text[:60], merge_equal=False, metadata={text[:60]: text})
    with site.store.jobs.submit(new) as arriving:
        arriving.add(rows)
    _land(site.store, arriving.job_id, text)
    return arriving.job_id


def _land(store: Store, job_id: str, text: str) -> None:
    answers = (
        lambda id_: NewResult(id_, 200, {"choices": [{"text": text}]}, finish_reason="stop"),
        lambda id_: NewResult.failure(id_, text[:30], text, status=500, param=text),
        lambda id_: NewResult(
            id_,
            200,
            {"results": [{"index": 0, "relevance_score": 0.5, "mean_nll": 1.0}]},
        ),
        lambda id_: NewResult(id_, 200, {"choices": [{"text": f'{{"a{TURNED}": "<b>x"}}'}]}),
    )
    for ref in plan(store, job_id, ALPHA):
        claimed = claim(store, ref)
        found = [answers[one.index](one.id) for one in claimed.requests]
        assert store.leases.finish(claimed.id, claimed.epoch, "worker", found)


def test_texts_of_strangers_do_nothing(tab: Tab, hostile_job: str) -> None:
    for path in (
        "/",
        f"/jobs/{hostile_job}",
        f"/jobs/{hostile_job}/results",
        f"/jobs/{hostile_job}/failures",
        f"/?q=%3Cscript%3Epwned%3D1%3C/script%3E{TURNED}",
        "/queues",
    ):
        tab.go(path)
        expect(tab.page.locator("main")).to_be_visible()
        planted = tab.page.locator("main :is(img, script[src], script:not([type]), b > svg)")
        assert planted.count() == 0, path
        assert tab.page.evaluate("() => typeof pwned") == "undefined", path
        harmful = tab.page.evaluate(f"() => document.body.innerHTML.search(/{HARMFUL}/)")
        assert harmful == -1, path
    tab.go(f"/jobs/{hostile_job}/results")
    shown = tab.page.locator("main").inner_text()
    assert "<script>pwned=1</script>" in shown
    assert "⟨right-to-left override⟩" in shown
    assert "␛[31m" in shown


def over(store: Store) -> str:
    """A job that has ended, and that nobody else looks at."""
    return make(store, Work(talk, 60, say))


def purge(store: Store, job_id: str) -> None:
    """Delete the rows of a job, as `nightjar purge --job` does."""
    store.shares.settle()  # as the planner does before
    assert store.retention.sweep(PurgeScope(job_id=job_id)).jobs == 1


def test_a_job_that_is_purged_while_its_results_are_read(tab: Tab, site: Site) -> None:
    job_id, page = over(site.store), tab.page
    tab.allow("410")
    tab.go(f"/jobs/{job_id}/results")
    expect(page.locator("article.row")).to_have_count(20)
    purge(site.store, job_id)
    page.get_by_role("link", name="Next rows").click()
    expect(page.get_by_role("heading", name="Deleted")).to_be_visible()
    tab.go(f"/jobs/{job_id}")
    expect(page.locator(".notice")).to_contain_text("Its rows were deleted")
    expect(page.locator(".now")).to_contain_text("60 of 60 rows")
    expect(page.locator("#figures")).to_have_count(0)
    expect(page.locator("#actions").get_by_role("button")).to_have_count(0)


def test_a_job_that_is_purged_while_its_live_page_is_open(tab: Tab, site: Site) -> None:
    job_id = make(site.store, Work(talk, 50, say, landed=0.5))
    page = tab.page
    tab.allow("410")
    tab.go(f"/jobs/{job_id}")
    expect(page.locator("#live-state")).to_have_text("Live")
    site.store.stopping.cancel(job_id)
    purge(site.store, job_id)
    expect(page.locator(".now .status")).to_have_text("Cancelled")
    expect(page.locator(".notice")).to_contain_text("Its rows were deleted")


def test_a_job_that_is_over_before_its_button_is_pressed(tab: Tab, site: Site) -> None:
    job_id, page = make(site.store, Work(talk, 50, say, landed=0.5)), tab.page
    tab.allow("409")
    tab.go(f"/jobs/{job_id}/confirm/pause")
    site.store.stopping.cancel(job_id)
    page.locator("main").get_by_role("button", name="Pause").click()
    expect(page.get_by_role("heading", name="Not possible now")).to_be_visible()
    page.get_by_role("link", name="Back to the job").click()
    expect(page.locator(".now .status")).to_have_text("Cancelled")
