"""Pages that move by themselves, over processes that compute with the fake engine."""

import re
from datetime import UTC, datetime, timedelta

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.deployments import Deployment, Site
from tests.browser.tabs import Tab

PATIENCE_MS = 40_000
ROWS = 400
KEEP_SHARES = """() => {
  const share = document.querySelector("#job .share");
  window.shares = [share.textContent];
  new MutationObserver(() => {
    const now = document.querySelector("#job .share").textContent;
    if (now !== window.shares.at(-1)) window.shares.push(now);
  }).observe(document.getElementById("job"), {subtree: true, childList: true, characterData: true});
}"""


def shares(page: Page) -> list[float]:
    """The percentages that the page has shown, in their order."""
    return [float(one.rstrip("%")) for one in page.evaluate("() => window.shares")]


@pytest.mark.xdist_group("deployment")
def test_a_job_is_seen_moving_to_its_end_without_a_reload(
    computing_tab: Tab, deployment: Deployment
) -> None:
    page = computing_tab.page
    job_id = deployment.submit(ROWS)
    computing_tab.go(f"/jobs/{job_id}")
    page.evaluate(KEEP_SHARES)
    expect(page.locator("#live-state")).to_have_text("Live")
    expect(page.locator(".now .status")).to_have_text("Completed", timeout=PATIENCE_MS)
    seen = shares(page)
    assert len(seen) > 2, seen
    assert seen == sorted(seen)
    assert seen[-1] == 100
    expect(page.locator("#actions").get_by_role("button")).to_have_count(0)
    page.wait_for_selector("#figures .plot canvas")
    page.get_by_role("link", name="Results").click()
    expect(page.locator("article.row")).to_have_count(20)
    page.get_by_role("link", name="Next rows").click()
    expect(page.locator("article.row header b").first).to_have_text("row-20")


@pytest.mark.xdist_group("deployment")
def test_the_list_the_queues_and_the_worker_show_what_is_computed(
    computing_tab: Tab, deployment: Deployment
) -> None:
    page = computing_tab.page
    computing_tab.go("/workers")
    expect(page.locator("article.card")).to_have_count(1)
    expect(page.locator("article.card")).to_contain_text("Idle")
    job_id = deployment.submit(ROWS)
    expect(page.locator("article.card")).to_contain_text("Computing", timeout=PATIENCE_MS)
    expect(page.locator("article.card").get_by_role("link", name=job_id).first).to_be_visible()
    computing_tab.go("/queues")
    expect(page.locator("table.queues tbody tr").first).to_contain_text("generate")
    computing_tab.go("/")
    row = page.locator(f"#row-{job_id}")
    expect(row.locator(".status")).to_have_text(re.compile("Running|Completed"))
    expect(row.locator(".status")).to_have_text("Completed", timeout=PATIENCE_MS)
    expect(row).to_contain_text(f"{ROWS:,} / {ROWS:,}")


@pytest.mark.xdist_group("deployment")
def test_an_api_that_restarts_is_found_again(computing_tab: Tab, deployment: Deployment) -> None:
    page = computing_tab.page
    computing_tab.allow("ERR_", "htmx:sse:error")
    computing_tab.go("/")
    expect(page.locator("#live-state")).to_have_text("Live")
    page.evaluate("() => { window.sameDocument = true }")
    api = deployment.system.services["api"]
    api.stop(20)
    expect(page.locator("#live-state")).to_have_text("Reconnecting")
    api.start()
    expect(page.locator("#live-state")).to_have_text("Live", timeout=PATIENCE_MS)
    job_id = deployment.submit(5)
    expect(page.locator(f"#row-{job_id}")).to_be_visible()
    assert page.evaluate("() => window.sameDocument"), "the page was loaded again"


def test_a_browser_whose_clock_is_wrong_sees_the_same(tab: Tab, site: Site) -> None:
    page = tab.page

    def told() -> list[str]:
        tab.go(f"/jobs/{site.jobs.failed}")
        facts = page.locator(".tiles, .steps").all_inner_texts()
        tab.go("/")
        expect(page.locator("#live-state")).to_have_text("Live")
        return facts + page.locator(f"#row-{site.jobs.failed}").all_inner_texts()

    right = told()
    page.clock.set_system_time(datetime.now(UTC) + timedelta(days=400, hours=7))
    assert page.evaluate("() => Date.now() / 1000") > datetime.now(UTC).timestamp() + 86_400
    assert told() == right
    page.clock.set_system_time(datetime(1999, 12, 31, tzinfo=UTC))
    assert told() == right


def test_scripts_that_arrive_late_miss_nothing(tab: Tab, site: Site) -> None:
    page = tab.page

    def late(route: Route) -> None:
        page.wait_for_timeout(300)
        route.continue_()

    for name in ("hx-sse.min.js", "charts.js", "page.js"):
        page.route(f"**/{name}", late)
    tab.go(f"/jobs/{site.jobs.running}")
    expect(page.locator("#live-state")).to_have_text("Live")
    expect(page.locator("#figures canvas")).to_have_count(3)
