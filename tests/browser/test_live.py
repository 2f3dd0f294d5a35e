"""Live pages of a site where nobody computes: a wrong clock, and scripts that are late."""

from datetime import UTC, datetime, timedelta

from playwright.sync_api import Route, expect

from tests.browser.deployments import Site
from tests.browser.tabs import Tab


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
