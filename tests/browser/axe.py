"""Runs axe-core (in `vendor/`) over a page."""

from functools import cache
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

_FILE = Path(__file__).with_name("vendor") / "axe.min.js"
_RUN = """async (options) => {
  const found = await axe.run(document, {resultTypes: ["violations"], ...options});
  return found.violations
    .filter((one) => ["serious", "critical"].includes(one.impact))
    .map((one) => ({id: one.id, help: one.help, where: one.nodes.slice(0, 3).map(
      (node) => node.html + " " + node.failureSummary)}));
}"""


@cache
def _source() -> str:
    return _FILE.read_text(encoding="utf-8")


def grave_faults(page: Page, rule: str | None = None) -> list[dict[str, Any]]:
    """Serious and critical faults of the page as it stands; each says where and how to mend it.

    rule: the only rule that is checked; None for all rules of axe-core.
    """
    if not page.evaluate("() => typeof axe === 'object'"):
        page.evaluate(_source())
    only = {} if rule is None else {"runOnly": [rule]}
    found: list[dict[str, Any]] = page.evaluate(_RUN, only)
    return found
