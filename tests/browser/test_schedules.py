"""Schedules: when they run next, how they ran, and a run by hand."""

from playwright.sync_api import expect

from nightjar.jobs.schedule_records import RunState, Trigger
from tests.browser.deployments import Site
from tests.browser.tabs import Tab


def test_a_schedule_shows_its_runs_and_is_run_now(tab: Tab, site: Site) -> None:
    page, schedule_id = tab.page, site.jobs.schedule
    tab.go("/schedules")
    row = page.locator(f"#row-{schedule_id}")
    expect(row).to_contain_text("Succeeded")
    expect(row.locator("[data-name='Next run']")).to_contain_text("in ")
    expect(page.locator(f"#row-{site.jobs.failing_schedule}")).to_contain_text("Failing")
    row.get_by_role("link").click()
    expect(page.locator("table.runs tbody tr")).to_have_count(9)
    page.locator("#actions").get_by_role("button", name="Run now").click()
    question = page.get_by_role("dialog")
    expect(question).to_contain_text("recommendations")
    assert len(site.store.schedule_runs.newest(schedule_id, 99)) == 9
    question.get_by_role("button", name="Run now").click()
    expect(page.locator("main > .notice")).to_contain_text("A run was made")
    expect(page.locator("table.runs tbody tr")).to_have_count(10)
    newest = site.store.schedule_runs.newest(schedule_id, 1)[0]
    assert (newest.trigger, newest.state) == (Trigger.MANUAL, RunState.WAITING)
    expect(page.locator(f"#row-{newest.id}")).to_contain_text("by hand")


def test_a_schedule_is_paused_and_goes_on(tab: Tab, site: Site) -> None:
    page, schedule_id = tab.page, site.jobs.failing_schedule
    tab.go(f"/schedules/{schedule_id}")
    for action, label in (("Pause", "Paused"), ("Resume", "Failing")):
        page.locator("#actions").get_by_role("button", name=action).click()
        page.get_by_role("dialog").get_by_role("button", name=action).click()
        expect(page.locator(".now .status")).to_have_text(label)
        paused = site.store.schedules.get("default", schedule_id).paused
        assert paused is (action == "Pause")
