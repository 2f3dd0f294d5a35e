"""Takes the pictures of the documents anew: `make screenshots`."""

import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, expect

from tests.browser.chromium import needed_chromium, running_chromium
from tests.browser.conftest import sign_in
from tests.browser.deployments import Site, filled_site
from tests.browser.places import PLACES
from tests.browser.tabs import DESKTOP, PHONE, opened_tab

FOLDER = Path(__file__).parents[2] / "docs" / "images" / "page"
MOST_BYTES = 100_000
# A picture: the page, whether it is dark, whether it is a phone's.
PICTURES = (
    ("jobs", False, False),
    ("jobs", True, True),
    ("running", False, False),
    ("running", True, False),
    ("failures", False, False),
    ("rankings", False, False),
    ("tables", False, False),
    ("workers", False, False),
    ("queues", False, False),
    ("schedules", False, False),
    ("schedule", False, False),
    ("tenants", False, False),
)


def main(folder: Path = FOLDER) -> None:
    """Write every picture; raises ValueError for one that is too large for the documents."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as kept,
        running_chromium(needed_chromium()) as chromium,
        filled_site(Path(kept)) as site,
    ):
        for name, dark, phone in PICTURES:
            words = [name, *(["dark"] if dark else []), *(["phone"] if phone else [])]
            path = folder / f"{'-'.join(words)}.png"
            take(chromium, site, path, name, dark=dark, phone=phone)
            if path.stat().st_size > MOST_BYTES:
                raise ValueError(f"{path.name} has {path.stat().st_size:,} bytes")


def take(chromium: Browser, site: Site, path: Path, name: str, *, dark: bool, phone: bool) -> None:
    """One picture of what a window of that size shows."""
    size = PHONE if phone else {**DESKTOP, "height": 1_180 if name == "running" else 760}
    scheme = "dark" if dark else "light"
    tab = opened_tab(chromium, site.url, viewport=size, color_scheme=scheme)
    sign_in(tab.page, site.url, site.operator_key)
    tab.go(PLACES[name](site.jobs))
    if tab.page.locator("#figures").count():
        expect(tab.page.locator("#figures canvas").first).to_be_visible()
    if tab.page.locator("[hx-sse\\:connect]").count():
        expect(tab.page.locator("#live-state")).to_have_text("Live")
    tab.page.screenshot(path=path)
    tab.close()
    with Image.open(path) as taken:  # 256 colours are enough, and a third of the bytes
        taken.convert("RGB").quantize(256).save(path, optimize=True)


if __name__ == "__main__":
    main()
