"""Every page, for everybody: as axe-core sees it by light and by dark, and on a phone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.axe import grave_faults
from tests.browser.conftest import Open
from tests.browser.deployments import Site
from tests.browser.places import PLACES
from tests.browser.tabs import DESKTOP, PHONE, Tab, opened_tab


@pytest.fixture(scope="module")
def kept_tab(chromium: Browser, site: Site, operator_state: Path) -> Iterator[Tab]:
    """One tab for all pages: scripts and styles are fetched once."""
    opened = opened_tab(chromium, site.url, storage_state=operator_state)
    yield opened
    opened.close()


@pytest.fixture
def tab(kept_tab: Tab) -> Iterator[Tab]:
    """The tab, as a desk has it, by light."""
    kept_tab.page.set_viewport_size(DESKTOP)
    kept_tab.page.emulate_media(color_scheme="light")
    yield kept_tab
    kept_tab.settle()


@pytest.mark.parametrize("name", PLACES)
def test_a_page_suits_everybody(tab: Tab, site: Site, name: str) -> None:
    tab.allow("404")
    tab.go(PLACES[name](site.jobs))
    page = tab.page
    expect(page.locator("main h1, main h2").first).to_be_visible()
    if page.locator("#figures").count():
        expect(page.locator("#figures canvas").first).to_be_visible()
    assert grave_faults(page) == []
    page.emulate_media(color_scheme="dark")
    assert grave_faults(page, "color-contrast") == []
    page.set_viewport_size(PHONE)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"]


def test_the_sign_in_page_suits_everybody(open_tab: Open) -> None:
    tab = open_tab(viewport=PHONE)
    tab.go("/sign-in")
    assert grave_faults(tab.page) == []
    tab.page.emulate_media(color_scheme="dark")
    assert grave_faults(tab.page, "color-contrast") == []
    assert tab.page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"]


def test_a_fault_is_seen(tab: Tab) -> None:
    tab.allow("404", "Failed to load")
    tab.go("/workers")
    tab.page.evaluate(
        "() => document.querySelector('main').insertAdjacentHTML('beforeend', '<input><img src=x>')"
    )
    assert {one["id"] for one in grave_faults(tab.page)} >= {"image-alt", "label"}
