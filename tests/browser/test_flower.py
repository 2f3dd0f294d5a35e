"""Flower in a browser: behind its password, with names that say what each micro-batch is."""

import json
import re

import httpx
import pytest
from playwright.sync_api import Browser, Error, expect

from tests.browser.deployments import FLOWER_LOGIN, Deployment
from tests.browser.tabs import opened_tab
from tests.processes import wait_until

pytestmark = pytest.mark.xdist_group("deployment")
PATIENCE_MS = 30_000
ROWS = 20
LOGIN = {"username": FLOWER_LOGIN[0], "password": FLOWER_LOGIN[1]}


def told(deployment: Deployment, state: str) -> str:
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
    job_id = deployment.submit(ROWS, "a planted owl")
    tab = opened_tab(chromium, deployment.flower_url, http_credentials=LOGIN)
    page = tab.page
    wait_until("the job in Flower", lambda: job_id in told(deployment, "SUCCESS"), 40)
    tab.go("/tasks")
    rows = page.locator("#tasks-table tbody tr")
    expect(rows.first).to_contain_text(re.compile(r"generate, bucket \d+"), timeout=PATIENCE_MS)
    found = json.loads(told(deployment, "SUCCESS"))
    tab.go(f"/task/{next(id_ for id_, one in found.items() if job_id in str(one['kwargs']))}")
    task = page.locator("body")
    expect(task).to_contain_text("SUCCESS", timeout=PATIENCE_MS)
    for field in ("micro_batch=", "requests=", "tokens=", "completion_tokens", job_id):
        expect(task).to_contain_text(field)
    assert "planted" not in page.content()
    tab.close()
