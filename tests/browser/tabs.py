"""A tab of a browser that keeps what the browser complains of, and where it wants to go."""

from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, Response, expect

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 360, "height": 740}


@dataclass
class Tab:
    """A page of the site at `url`, in a browser of its own."""

    context: BrowserContext
    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()

    def go(self, path: str = "/") -> Response:
        """Open a page of the site, and wait until its scripts have run."""
        answer = self.page.goto(f"{self.url}{path}", wait_until="load")
        assert answer is not None, path
        return answer

    def allow(self, *texts: str) -> None:
        """Let complaints pass that hold one of these texts."""
        self.expected += texts

    def close(self) -> None:
        """Close it; AssertionError if the browser complained, or asked another host."""
        self.context.close()
        self.settle()

    def settle(self) -> None:
        """Forget what was allowed; AssertionError if the browser complained of anything else."""
        complaints, self.complaints[:] = list(self.complaints), []
        expected, self.expected = self.expected, ()
        left = [one for one in complaints if not any(text in one for text in expected)]
        assert left == [], left
        assert self.elsewhere == [], self.elsewhere


def opened_tab(chromium: Browser, url: str, **options: Any) -> Tab:
    """A new browser context with one page; scripts that break the page's policy are complaints."""
    context = chromium.new_context(**{"viewport": DESKTOP, "reduced_motion": "reduce", **options})
    page = context.new_page()
    tab = Tab(context, page, url)
    host = url.removesuffix("/ui")

    def watch_console(message: Any) -> None:
        if message.type in ("error", "warning"):
            tab.complaints.append(message.text)

    def watch_request(request: Any) -> None:
        if not request.url.startswith((host, "data:", "about:")):
            tab.elsewhere.append(request.url)

    page.on("console", watch_console)
    page.on("pageerror", lambda error: tab.complaints.append(str(error)))
    page.on("dialog", lambda dialog: tab.complaints.append(f"a dialog: {dialog.message}"))
    context.on("request", watch_request)
    return tab


def asked(page: Page, action: str) -> None:
    """Press the button of an action; its question is open then."""
    page.locator("#actions").get_by_role("button", name=action).click()
    expect(page.get_by_role("dialog")).to_be_visible()
