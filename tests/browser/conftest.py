"""Chromium, what it looks at, and tabs that notice what a browser complains of."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.chromium import needed_chromium, running_chromium
from tests.browser.deployments import (
    COMPUTING_KEY,
    Deployment,
    Site,
    computing_deployment,
    filled_site,
)
from tests.browser.tabs import Tab, opened_tab

PATIENCE_S = 10.0

Open = Callable[..., Tab]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """The browser of the session."""
    expect.set_options(timeout=PATIENCE_S * 1_000)
    with running_chromium(needed_chromium()) as browser:
        yield browser


@pytest.fixture(scope="session")
def site(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Jobs in every state behind an API; without a browser nothing is started."""
    with filled_site(tmp_path_factory.mktemp("site")) as opened:
        yield opened


@pytest.fixture(scope="session")
def deployment(
    chromium: Browser, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Processes that compute with the fake engine."""
    with computing_deployment(tiny_model, tmp_path_factory.mktemp("deployment")) as opened:
        yield opened


@pytest.fixture(scope="session")
def operator_state(chromium: Browser, site: Site, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cookies of a browser in which the operator of the site has signed in."""
    folder = tmp_path_factory.mktemp("cookies")
    return _kept_cookies(chromium, site.url, site.operator_key, folder)


@pytest.fixture(scope="session")
def computing_state(
    chromium: Browser, deployment: Deployment, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same of the deployment that computes."""
    folder = tmp_path_factory.mktemp("cookies")
    return _kept_cookies(chromium, deployment.url, COMPUTING_KEY, folder)


def _kept_cookies(chromium: Browser, url: str, key: str, folder: Path) -> Path:
    context = chromium.new_context()
    sign_in(context.new_page(), url, key)
    kept = folder / "cookies.json"
    context.storage_state(path=kept)
    context.close()
    return kept


@pytest.fixture
def open_tab(chromium: Browser, site: Site) -> Iterator[Open]:
    """Opens a tab of a browser that nobody has signed in with; takes options of a context."""
    yield from _opening(chromium, site.url)


@pytest.fixture
def tab(open_tab: Open, operator_state: Path) -> Tab:
    """A tab of the operator's browser."""
    return open_tab(storage_state=operator_state)


@pytest.fixture
def computing_tab(
    chromium: Browser, deployment: Deployment, computing_state: Path
) -> Iterator[Tab]:
    """A tab of a browser signed in to the deployment that computes."""
    opened = opened_tab(chromium, deployment.url, storage_state=computing_state)
    yield opened
    opened.close()


def _opening(chromium: Browser, url: str) -> Iterator[Open]:
    tabs: list[Tab] = []

    def give(**options: Any) -> Tab:
        tabs.append(opened_tab(chromium, url, **options))
        return tabs[-1]

    yield give
    for one in tabs:
        one.close()


def sign_in(page: Page, url: str, key: str) -> None:
    """Sign in by the form."""
    page.goto(f"{url}/sign-in")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
