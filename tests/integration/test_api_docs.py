"""The page `/docs` shows the OpenAPI document with files of ours: nothing comes from elsewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from nightjar.jobs.accounts import NewKey, Tenant
from nightjar.jobs.api.page.assets import FOLDER, assets
from nightjar.jobs.states import Scope
from nightjar.jobs.store import Store
from tests.api_app import real_app

OUTSIDE = re.compile(r"(?:https?:)?//[\w.-]+\.\w+")


@pytest.fixture
def client(sqlite_tables: str) -> Iterator[TestClient]:
    store = Store(sqlite_tables)
    store.accounts.create_tenant(Tenant("owls"))
    store.accounts.create_key(NewKey("owls", Scope.READ))  # so that the API needs keys
    with TestClient(real_app(store), base_url="http://127.0.0.1") as opened:
        yield opened
    store.close()


def test_everything_that_the_page_names_is_served_here_without_a_key(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.status_code == 200
    assert OUTSIDE.search(page.text) is None
    named = re.findall(r'(?:src|href|data-document)="([^"]+)"', page.text)
    assert {path.rsplit("/", 1)[-1] for path in named} >= {
        *("swagger-ui-bundle.js", "swagger-ui.css", "api_docs.js", "api_docs.css"),
        "openapi.json",
    }
    for path in named:
        assert client.get(f"/{path.lstrip('/')}").status_code == 200, path
    assert "/v1/jobs" in client.get("/openapi.json").json()["paths"]


def test_its_policy_lets_a_browser_reach_no_other_host(client: TestClient) -> None:
    policy = client.get("/docs").headers["content-security-policy"]
    sources = {name: set(rest) for name, *rest in (part.split() for part in policy.split("; "))}
    assert sources.pop("default-src") == {"'none'"}
    assert sources.pop("img-src") == {"'self'", "data:"}
    assert {source for allowed in sources.values() for source in allowed} == {"'self'", "'none'"}
    assert sources["script-src"] == sources["connect-src"] == {"'self'"}


def test_its_own_files_name_no_other_host() -> None:
    files = assets()
    own = [files["api_docs.js"], files["api_docs.css"]]
    assert [OUTSIDE.search(file.plain.decode()) for file in own] == [None, None]
    assert b"validatorUrl: null" in own[0].plain  # else the document is sent to one for a badge
    style = files["vendor/swagger-ui.css"].plain.decode()
    loaded = re.findall(r"url\(['\"]?(\w+:|//|[^'\")]{0,40})", style)
    assert set(loaded) == {"data:"}
    assert "@import" not in style


def test_every_file_of_others_is_listed_with_its_licence() -> None:
    folder = FOLDER / "vendor"
    listed = (folder / "VENDORED.txt").read_text(encoding="utf-8")
    present = {path.name for path in folder.iterdir()} - {"VENDORED.txt"}
    named = {Path(name).name for name in re.findall(r"[\w./-]+\.(?:js|css|txt)\b", listed)}
    assert named == present
    assert listed.count("\nname: ") == listed.count("\nlicence: ") == listed.count("sha512-")
