"""What can be done with a job: each act behind its question, by mouse and by keyboard alone."""

import pytest
from playwright.sync_api import Page, expect

from nightjar.jobs.states import JobState
from nightjar.jobs.store import Store
from tests.browser.deployments import Site
from tests.browser.tabs import Tab, asked
from tests.shown_jobs import Work, make, say, talk


def new_job(store: Store) -> str:
    """A job that nobody computes, with some rows landed."""
    return make(store, Work(talk, 50, say, landed=0.5))


def test_each_act_is_asked_for_and_then_done(tab: Tab, site: Site) -> None:
    job_id, page = new_job(site.store), tab.page
    tab.go(f"/jobs/{job_id}")
    for action, button, state, label in (
        ("Pause", "Pause", JobState.PAUSED, "Paused"),
        ("Resume", "Resume", JobState.RUNNING, "Running"),
        ("Cancel", "Cancel job", JobState.CANCELLED, "Cancelled"),
    ):
        before = site.store.jobs.get(job_id).state
        asked(page, action)
        expect(page.get_by_role("dialog")).to_contain_text(job_id)
        assert site.store.jobs.get(job_id).state is before
        page.get_by_role("dialog").get_by_role("button", name=button, exact=True).click()
        expect(page.locator(".now .status")).to_have_text(label)
        expect(page.locator("main > .notice")).to_be_visible()
        assert site.store.jobs.get(job_id).state is state
    expect(page.locator("#actions").get_by_role("button")).to_have_count(0)


@pytest.mark.parametrize("way", ["Leave it", "Escape", "outside"])
def test_a_question_that_is_left_changes_nothing(tab: Tab, site: Site, way: str) -> None:
    page, jobs = tab.page, site.jobs
    tab.go(f"/jobs/{jobs.running}")
    asked(page, "Cancel")
    if way == "Leave it":
        page.get_by_role("dialog").get_by_role("button", name=way).click()
    elif way == "Escape":
        page.keyboard.press("Escape")
    else:
        page.mouse.click(5, 5)
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page).to_have_url(f"{site.url}/jobs/{jobs.running}")
    assert site.store.jobs.get(jobs.running).state is JobState.RUNNING


def test_the_keyboard_alone_finds_a_job_and_cancels_it(tab: Tab, site: Site) -> None:
    job_id, page = new_job(site.store), tab.page
    tab.go("/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.type(job_id)
    page.keyboard.press("Enter")
    expect(page.locator("table.jobs tbody tr")).to_have_count(1)
    tab_to(page, page.get_by_role("link", name=job_id))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=job_id)).to_be_visible()
    cancel = page.locator("#actions").get_by_role("button", name="Cancel")
    tab_to(page, cancel)
    page.keyboard.press("Space")
    question = page.get_by_role("dialog")
    expect(question).to_be_visible()
    assert page.evaluate("() => document.activeElement.closest('dialog') !== null")
    page.keyboard.press("Escape")
    expect(cancel).to_be_focused()
    page.keyboard.press("Enter")
    tab_to(page, question.get_by_role("button", name="Cancel job"))
    page.keyboard.press("Enter")
    expect(page.locator(".now .status")).to_have_text("Cancelled")
    assert site.store.jobs.get(job_id).state is JobState.CANCELLED


def tab_to(page: Page, wanted: object) -> None:
    """Press Tab until the element has the focus; each stop on the way can be seen."""
    for _ in range(40):
        page.keyboard.press("Tab")
        outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", page.evaluate("() => document.activeElement.outerHTML")
        if wanted.evaluate("(one) => one === document.activeElement"):  # type: ignore[attr-defined]
            return
    raise AssertionError(f"Tab does not lead to {wanted}")


def test_a_page_of_another_browser_does_nothing(tab: Tab, site: Site) -> None:
    page, running = tab.page, site.jobs.running
    tab.allow("403")
    tab.go(f"/jobs/{running}/confirm/cancel")
    page.evaluate("() => { document.querySelector('main [name=token]').value = 'a'.repeat(24) }")
    page.locator("main").get_by_role("button", name="Cancel job").click()
    expect(page.get_by_role("heading", name="Not allowed")).to_be_visible()
    assert site.store.jobs.get(running).state is JobState.RUNNING
