"""What the page and Flower show of a deployment that computes, with the fake engine.

These tests share one deployment: `make test-browser` gives each file to one process.
"""

import json
import re

import httpx
from playwright.sync_api import Browser, Error, Page, expect

from tests.browser.deployments import FLOWER_LOGIN, Deployment
from tests.browser.tabs import Tab, asked, opened_tab
from tests.processes import wait_until

PATIENCE_MS = 40_000
ROWS = 200
FEW = 20
LOGIN = {"username": FLOWER_LOGIN[0], "password": FLOWER_LOGIN[1]}
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


def test_failures_are_retried_by_processes_that_compute(
    computing_tab: Tab, deployment: Deployment
) -> None:
    page = computing_tab.page
    job_id = deployment.submit(3, "<poison:raise>")
    computing_tab.go(f"/jobs/{job_id}")
    expect(page.locator(".now .status")).to_have_text("Failed", timeout=PATIENCE_MS)
    page.get_by_role("link", name="Failures").click()
    expect(page.locator("table.reasons")).to_contain_text("internal_error")
    expect(page.locator("table.failed-rows tbody tr")).to_have_count(3)
    page.get_by_role("link", name="Overview").click()
    asked(page, "Retry")
    page.get_by_role("dialog").get_by_role("button", name="Retry failures").click()
    expect(page.locator("main > .notice")).to_contain_text("queued again")
    # They fail again: the page sees the second end, too.
    expect(page.locator(".now .status")).to_have_text("Failed", timeout=PATIENCE_MS)


def in_flower(deployment: Deployment, state: str) -> str:
    """What Flower has heard of micro-batches in this state."""
    url = f"{deployment.flower_url}/api/tasks?limit=1000&state={state}"
    return httpx.get(url, auth=FLOWER_LOGIN, timeout=30).raise_for_status().text


def test_without_the_password_nothing_is_shown(chromium: Browser, deployment: Deployment) -> None:
    for login in (None, {**LOGIN, "password": "wrong"}):
        tab = opened_tab(chromium, deployment.flower_url, http_credentials=login)
        tab.allow("401", "ERR_INVALID_AUTH_CREDENTIALS")
        for path in ("/", "/tasks", "/workers"):
            try:  # Chromium shows an error of its own, or the empty page that came with the 401
                said = str(tab.go(path).status)
            except Error as error:
                said = error.message
            assert "401" in said or "ERR_INVALID_AUTH_CREDENTIALS" in said
        tab.close()


def test_each_micro_batch_has_a_name_its_size_and_its_outcome(
    chromium: Browser, deployment: Deployment
) -> None:
    job_id = deployment.submit(FEW, "a planted owl")
    tab = opened_tab(chromium, deployment.flower_url, http_credentials=LOGIN)
    page = tab.page
    wait_until("the job in Flower", lambda: job_id in in_flower(deployment, "SUCCESS"), 40)
    tab.go("/tasks")
    rows = page.locator("#tasks-table tbody tr")
    expect(rows.first).to_contain_text(re.compile(r"generate, bucket \d+"), timeout=PATIENCE_MS)
    found = json.loads(in_flower(deployment, "SUCCESS"))
    tab.go(f"/task/{next(id_ for id_, one in found.items() if job_id in str(one['kwargs']))}")
    task = page.locator("body")
    expect(task).to_contain_text("SUCCESS", timeout=PATIENCE_MS)
    for field in ("micro_batch=", "requests=", "tokens=", "completion_tokens", job_id):
        expect(task).to_contain_text(field)
    assert "planted" not in page.content()
    tab.close()
