"""The documents of the repository as tests read them: pages, prose, links, commands."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARKED = re.compile(
    r"^<!-- test: run these commands -->\n```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
# What a program writes: its words are checked where it is written.
_GENERATED = re.compile(
    r"<!-- (?:figures: [\w.-]+|faults begin) -->.*?<!-- (?:end of figures|faults end) -->"
    r"|^## Survivors\n.*\Z",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        """The path from the repository's root."""
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        """The whole file."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def code(self) -> list[str]:
        """What stands in fenced blocks of shell commands."""
        return [body for language, body in _FENCE.findall(self.text) if language in ("", "bash")]

    @cached_property
    def prose(self) -> str:
        """The text without code blocks, comments and what a program writes."""
        text = _FENCE.sub("", _GENERATED.sub("", self.text))
        return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)

    @cached_property
    def anchors(self) -> set[str]:
        """The anchors that GitHub gives to the headings."""
        heads = re.findall(r"^#+ (.+)$", _FENCE.sub("", self.text), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}

    def links(self) -> list[str]:
        """Return the targets of links and pictures that are files of the repository, or anchors."""
        found = re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", self.text))
        return [target for target in found if "://" not in target]

    def sentences(self) -> list[str]:
        """Every sentence, with a table's cells and a list's items each by itself."""
        found = []
        for paragraph in _paragraphs(self.prose):
            plain = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", paragraph)
            plain = re.sub(r"`[^`]*`", "CODE", plain)
            found += [part for part in re.split(r"(?<=[.:;?!])\s+", plain) if part.strip()]
        return found


def _paragraphs(prose: str) -> list[str]:
    """Paragraphs, list items and table cells, each on one line."""
    found = [""]
    for line in prose.splitlines():
        if line.startswith("|"):
            found += [*re.split(r"(?<!\\)\|", line), ""]
        elif not line.strip() or line.startswith("#"):
            found.append("")
        elif re.match(r"\s*([-*]|\d+\.) ", line):
            found.append(re.sub(r"^\s*([-*]|\d+\.) ", "", line))
        else:
            found[-1] += " " + line.strip()
    return [text for text in found if text.strip()]


def marked_commands(page: str) -> list[str]:
    """The shell blocks of a page that a test runs as they are written."""
    return _MARKED.findall((ROOT / page).read_text(encoding="utf-8"))


def pages() -> list[Page]:
    """README, CHANGELOG, every page below docs/, and the logs and cards that they link."""
    listed = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [Page(path) for path in listed]


def words(sentence: str) -> int:
    """How many words a sentence has; a number or a name in code is one."""
    return len(re.findall(r"[\w'./%+-]*\w[\w'./%+-]*", sentence))
