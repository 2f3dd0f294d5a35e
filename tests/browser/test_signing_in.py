"""Who gets in, and what a key does not reach."""

from playwright.sync_api import expect

from tests.browser.conftest import Open, sign_in
from tests.browser.deployments import Site


def test_a_wrong_key_is_told_and_the_right_one_leads_to_the_page(
    open_tab: Open, site: Site
) -> None:
    tab = open_tab()
    tab.allow("401")
    page = tab.page
    tab.go("/queues")
    expect(page).to_have_url(f"{site.url}/sign-in?next=%2Fui%2Fqueues")
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.type("nj_wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_be_visible()
    expect(page.get_by_label("API key")).to_have_attribute("aria-invalid", "true")
    page.get_by_label("API key").fill(site.tenant_key)
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{site.url}/queues")
    expect(page.locator(".who")).to_have_text("search · submit")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    page.go_back()
    page.reload()
    expect(page.get_by_label("API key")).to_be_visible()


def test_a_key_is_in_no_address_and_out_of_reach_of_scripts(open_tab: Open, site: Site) -> None:
    tab = open_tab()
    asked: list[str] = []
    tab.page.on("request", lambda request: asked.append(request.url))
    sign_in(tab.page, site.url, site.tenant_key)
    assert len(asked) > 3
    assert not [url for url in asked if site.tenant_key in url]
    assert tab.page.evaluate("() => document.cookie") == ""
    assert site.tenant_key not in tab.page.content()


def test_a_job_of_another_tenant_is_not_found(open_tab: Open, site: Site) -> None:
    tab = open_tab()
    tab.allow("404")
    sign_in(tab.page, site.url, site.tenant_key)
    rows = tab.page.locator("table.jobs tbody tr")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text(site.jobs.foreign)
    for rest in ("", "/results", "/failures", "/confirm/cancel"):
        answer = tab.go(f"/jobs/{site.jobs.running}{rest}")
        assert answer.status == 404
        expect(tab.page.get_by_role("heading", name="Not found")).to_be_visible()
        assert "hyperclova" not in tab.page.locator("main").inner_text()
    assert tab.go(f"/jobs/{site.jobs.foreign}").status == 200


def test_the_operator_lists_another_tenants_jobs_without_links(
    open_tab: Open, operator_state: object, site: Site
) -> None:
    tab = open_tab(storage_state=operator_state)
    tab.go("/")
    tab.page.get_by_label("Tenant").select_option("search")
    tab.page.get_by_role("button", name="Show").click()
    rows = tab.page.locator("table.jobs tbody tr")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text(site.jobs.foreign)
    expect(rows.get_by_role("link")).to_have_count(0)
