"""`make docs`: the documents as a site, without a warning and without another host."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.documents import ROOT, pages

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [str(Path(sys.executable).with_name("mkdocs")), "build", "--strict", "--site-dir", place],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return place


def test_every_page_is_in_the_site_and_in_its_search(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert len(index["docs"]) > 300
    for page in pages():
        below = page.path.is_relative_to(ROOT / "docs")
        home = page.path.relative_to(ROOT / "docs") if below else Path("repository", page.name)
        name = home.with_name("index.md") if home.name == "README.md" else home
        html = name.with_suffix(".html").as_posix()
        assert (site / html).is_file(), page.name
        assert html in found, page.name


def test_every_link_leads_to_a_file_of_the_site(site: Path) -> None:
    wrong, checked = [], 0
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r'(?:href|src)="?([^"\s>]+)', text):
            path = unquote(target.partition("#")[0].partition("?")[0])
            if not path or ":" in path:
                continue
            checked += 1
            if not (page.parent / path).exists():
                wrong.append((page.relative_to(site).as_posix(), target))
    assert wrong == []
    assert checked > 2000


def test_no_page_loads_from_another_host(site: Path) -> None:
    loading = re.compile(
        r'<(?:script|img|iframe)[^>]*\bsrc="?(?:https?:)?//|<link[^>]*\bhref="?https?://'
    )
    texts = [path.read_text(encoding="utf-8") for path in site.rglob("*.html")]
    assert len(texts) > 40
    assert [found[0] for text in texts if (found := loading.search(text))] == []


def test_the_clients_classes_are_described(site: Path) -> None:
    text = (site / "reference" / "python-api.html").read_text(encoding="utf-8")
    names = set(re.findall(r'id="nightjar\.pipeline\.client\.([\w.]+)"', text))
    assert {"blocking.Client", "blocking.Client.submit", "errors.RefusedError"} <= names
    assert {"asynchronous.AsyncClient", "records.Result", "requests.Generate"} <= names
