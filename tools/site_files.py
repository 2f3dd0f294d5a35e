"""A hook of mkdocs: the navigation, and files outside docs/ that pages link.

The navigation is that of docs/README.md, so that there is one list of the pages in one order.
On the forge such a link opens the file. The site has a copy of it below `repository/`: a page for
Markdown, else the file itself. A link to a folder or to what is no document becomes plain text.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PLACE = "repository"
_THEIR_SHIM = "https://unpkg.com/iframe-worker/shim"
_OWN_SHIM = "site/iframe-worker.js"
_LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_PROJECT = (("Read me", "README.md"), ("Changelog", "CHANGELOG.md"))
_COPIED = (".md", ".json", ".svg", ".png", ".csv", ".toml", ".yaml", ".yml")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from docs/README.md: a section for each heading with a list of pages."""
    nav: list[dict[str, object]] = [{"Documents": "README.md"}]
    text = (DOCS / "README.md").read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0].partition(":")[0]
        listed = re.findall(r"^- \[([^]]+)\]\(([\w/-]+\.md)\)", section, re.MULTILINE)
        nav.append({title: [{name: path} for name, path in listed]})
    nav.append({"Project": [{name: f"{PLACE}/{path}"} for name, path in _PROJECT]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link, and what the pages that are added link."""
    waiting = [Path(str(file.abs_src_path)) for file in files.documentation_pages()]
    added: set[Path] = set()
    while waiting:
        page = waiting.pop()
        for target in _targets(page) - added:
            added.add(target)
            name = f"{PLACE}/{target.relative_to(ROOT).as_posix()}"
            files.append(File.generated(config, name, abs_src_path=str(target)))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to the copies."""
    del config, files
    source = page.file.src_uri
    inside = source.startswith(f"{PLACE}/")
    home = ROOT / source.removeprefix(f"{PLACE}/") if inside else DOCS / source

    def linked(found: re.Match[str]) -> str:
        picture, text, path, anchor = found.groups()
        if "://" in path or path.startswith("mailto:"):
            return found[0]
        target = (home.parent / path).resolve()
        name = _name(target)
        if name is None:
            return found[0] if target.is_relative_to(DOCS) and not inside else str(text)
        there = os.path.relpath(name, Path(source).parent)
        return f"{picture}[{text}]({there}{anchor or ''})"

    parts = _CODE.split(markdown)
    return "".join(part if at % 2 else _LINK.sub(linked, part) for at, part in enumerate(parts))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take the script for the search from here: the theme would load it from another host."""
    del config
    here = os.path.relpath(_OWN_SHIM, Path(page.url or "index.html").parent)
    return output.replace(_THEIR_SHIM, here)


def on_post_template(output: str, *, template_name: str, config: MkDocsConfig) -> str:
    """The same in pages that are no documents, such as the one for a page that is not there."""
    del config
    return output.replace(_THEIR_SHIM, _OWN_SHIM) if template_name.endswith(".html") else output


def _targets(page: Path) -> set[Path]:
    """The files outside docs/ that a page links and the site can show."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    paths = [(page.parent / found[3]).resolve() for found in _LINK.finditer(text)]
    return {path for path in paths if not path.is_relative_to(DOCS) and _name(path) is not None}


def _name(target: Path) -> str | None:
    """The file's place in the site; None of what is not there."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix() if target.is_file() else None
    if not target.is_relative_to(ROOT) or not target.is_file() or target.suffix not in _COPIED:
        return None
    return f"{PLACE}/{target.relative_to(ROOT).as_posix()}"
