"""Every message of the page of troubleshooting is one that the source prints."""

import ast
import re
from functools import cache

import pytest

from tests.documents import ROOT, Page

PAGE = Page(ROOT / "docs" / "guides" / "troubleshooting.md")
ROOMS = ("checkpoints", "gpu_worker", "jobs", "kernels", "pipeline")
MESSAGES = re.findall(r'^\| "([^"|]+)" \|', PAGE.text, re.MULTILINE)


@cache
def _texts() -> str:
    """Every text of the source; docstrings and comments are none."""
    found = []
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            found += [
                node.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in said
            ]
    return "\n".join(found)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_printed_by_the_product(message: str) -> None:
    assert message in _texts()


def test_every_row_has_a_message_a_cause_and_a_mend() -> None:
    rows = re.findall(r"^\| (?!message|-)(.+) \|$", PAGE.text, re.MULTILINE)
    cells = [row.split(" | ") for row in rows if not row.startswith("---")]
    assert len(cells) == len(MESSAGES) >= 15
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in cells)
