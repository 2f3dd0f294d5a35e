"""What the documents name exists: links, paths, commands, settings. Their sentences are short."""

import importlib.util
import json
import re
import shlex
import statistics
from functools import cache

import pytest
import typer.main

from nightjar.pipeline.front.cli import app
from nightjar.pipeline.settings import Settings
from nightjar.pipeline.settings.variables import OTHER_VARIABLES
from tests.documents import ROOT, Page, pages, words

PAGES = pages()
IDS = [page.name for page in PAGES]
each_page = pytest.mark.parametrize("page", PAGES, ids=IDS)

ROOMS = ("benchmarks", "checkpoints", "docs", "examples", "gpu_worker", "jobs", "kernels")
ROOMS += ("migrations", "nightjar", "pipeline", "tests", "tools")
MOST_WORDS = 30
LEAST_SHARE_OF_SHORT = 0.8  # of at most SHORT words
SHORT = 20
# The house words that the glossary replaces, and what to say.
HOUSE_WORDS = {
    r"asked for ahead|asks? for ahead": "prefetch",
    r"running texts?|texts? that runs?|texts? of a step|texts? in 16 bits": "sequence",
    r"(?:freed|free) places?\b": "slot",
    r"\bturned and\b|normalised, turned": "rotary embedding",
    r"\bcompile gate\b": "compile check",
    r"\bin no company|in any company\b": "in any batch",
}


@each_page
def test_every_link_leads_to_a_file_and_a_heading(page: Page) -> None:
    wrong = []
    for target in page.links():
        path, _, anchor = target.partition("#")
        found = (page.path.parent / path).resolve() if path else page.path
        there = found.exists() and found.is_relative_to(ROOT)
        if not there or (anchor and anchor not in Page(found).anchors):
            wrong.append(target)
    assert wrong == []


# The other two name the files of the version that they are about.
@pytest.mark.parametrize(
    "name", [name for name in IDS if name not in ("CHANGELOG.md", "docs/reference/mutants.md")]
)
def test_every_path_that_a_page_names_is_there(name: str) -> None:
    page = Page(ROOT / name)
    named = re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w./-]*)`", page.text)
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_test_that_the_review_names_is_there() -> None:
    text = (ROOT / "docs" / "reference" / "review.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:unit|integration|faults|acceptance|migration)/[\w.]+\.py)`", text)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / "tests" / name).is_file()] == []


def test_every_document_that_the_code_names_is_there() -> None:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    files += [ROOT / "Makefile", ROOT / "tools" / "first_gpu_hour"]
    named = {
        (found, path.name)
        for path in files
        for found in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 5
    assert [pair for pair in sorted(named) if not (ROOT / pair[0]).is_file()] == []


def test_every_page_is_in_the_index() -> None:
    linked = {
        (ROOT / "docs" / target).resolve() for target in Page(ROOT / "docs/README.md").links()
    }
    assert {page.path for page in PAGES if page.path.is_relative_to(ROOT / "docs")} - linked == {
        ROOT / "docs" / "README.md"
    }


@cache
def _options() -> dict[str, set[str]]:
    """The options of each command; one of a group has the name of the group before its own."""
    commands = dict(typer.main.get_group(app).commands)
    for group, command in list(commands.items()):
        for name, within in getattr(command, "commands", {}).items():
            commands[f"{group} {name}"] = within
    return {
        name: {option for param in command.params for option in param.opts}
        for name, command in commands.items()
    }


def _told(pages: list[Page]) -> list[tuple[str, str]]:
    """Every shell command of the pages: those of code blocks and those within sentences."""
    found = []
    for page in pages:
        lines = [line for block in page.code for line in block.replace("\\\n", " ").splitlines()]
        lines += [" ".join(quoted.split()) for quoted in re.findall(r"`([^`]+)`", page.prose)]
        found += [(page.name, line) for line in lines]
    return found


def test_every_nightjar_command_has_the_options_that_it_is_told_with() -> None:
    wrong, seen = [], set()
    for where, line in _told(PAGES):
        told = re.match(r"(?:\w+=\$\()?(?:\.venv/bin/)?nightjar (\w[\w-]*)(.*)", line)
        if told is None:
            continue
        name, rest = told.groups()
        second = rest.split()[:1]
        if (within := " ".join([name, *second])) in _options():
            name = within
        seen.add(name)
        if name not in _options():
            wrong.append((where, line))
            continue
        for option in re.findall(r"(?<!\S)\[?(--[\w-]+)", rest.partition("#")[0]):
            if option not in _options()[name]:
                wrong.append((where, f"{line}: {option}"))
    assert wrong == []
    assert {"run", "migrate", "api", "worker", "submit", "retry", "keys create"} <= seen


def test_every_command_that_the_page_or_a_message_names_exists() -> None:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.html")]
    files += [
        path for room in ("jobs", "pipeline", "gpu_worker") for path in (ROOT / room).rglob("*.py")
    ]
    told = [
        (path.name, words.split())
        for path in files
        for words in re.findall(
            r"(?:`|<code>)nightjar ([a-z][a-z -]*[a-z])", path.read_text(encoding="utf-8")
        )
    ]
    assert len(told) > 20
    groups = {name.split()[0] for name in _options() if " " in name}
    wrong = [
        (where, words)
        for where, words in told
        if words[0] not in _options()
        or (words[0] in groups and len(words) > 1 and " ".join(words[:2]) not in _options())
    ]
    assert wrong == []


def test_every_make_target_and_module_that_is_told_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    told = [line for _, line in _told(PAGES)]
    made = {found for line in told for found in re.findall(r"^make ([\w-]+)", line)}
    modules = {found for line in told for found in re.findall(r"python3? -m ([\w.]+)", line)}
    scripts = {found for line in told for found in re.findall(r"python3? (\w+/[\w/.]+)", line)}
    assert made
    assert made - targets == set()
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    assert [name for name in scripts if not (ROOT / name).exists()] == []


@each_page
def test_every_variable_that_a_page_names_is_read(page: Page) -> None:
    known = {f"NIGHTJAR_{name.upper()}" for name in Settings.model_fields}
    known |= OTHER_VARIABLES.keys()
    named = set(re.findall(r"\bNIGHTJAR_[A-Z_]*[A-Z]\b", page.text))
    assert {name for name in named - known if not name.startswith("NIGHTJAR_TEST_")} == set()


def test_the_measurements_are_those_of_their_files() -> None:
    text = (ROOT / "docs" / "reference" / "measurements.md").read_text(encoding="utf-8")
    checked = 0
    for name, table in re.findall(r"<!-- file: (\S+) -->\n\n((?:\|.*\n)+)", text):
        record = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
        head, _, *rows = (_cells(line) for line in table.splitlines())
        for row in rows:
            for column, cell in zip(head[1:-1], row[1:-1], strict=True):
                value: object = _column(record, column)
                for key in row[-1].strip("`").split("."):
                    assert isinstance(value, dict)
                    value = value[key]
                assert float(cell.replace(",", "")) == value, (name, row[0], column)
                checked += 1
    assert checked > 30


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _column(record: dict[str, object], column: str) -> object:
    if column in ("SQLite", "PostgreSQL"):
        return record[column.lower()]
    model = record.get("demo_model")
    return model["by_precision"][column] if isinstance(model, dict) else record


def test_every_result_file_is_named_by_a_page() -> None:
    named = "".join(page.text for page in PAGES)
    kept = [path for path in (ROOT / "benchmarks" / "results").iterdir() if path.is_file()]
    assert [path.name for path in kept if path.name not in named] == []


@each_page
def test_sentences_are_short(page: Page) -> None:
    counts = [(words(sentence), sentence) for sentence in page.sentences()]
    assert [sentence for count, sentence in counts if count > MOST_WORDS] == []
    # Names and numbers in a table's cells are no sentences.
    real = [count for count, _ in counts if count > 3]
    assert sum(count <= SHORT for count in real) >= LEAST_SHARE_OF_SHORT * len(real)
    assert statistics.median(real) <= 15


@each_page
def test_pages_use_the_glossary_and_no_house_words(page: Page) -> None:
    found = {
        (match, say)
        for pattern, say in HOUSE_WORDS.items()
        for match in re.findall(pattern, page.prose, re.IGNORECASE)
    }
    assert found == set()


def test_the_glossary_is_a_page_and_has_each_term_once() -> None:
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| \*\*([^*]+)\*\* \| (.+) \|$", text, re.MULTILINE)
    names = [name for name, _ in terms]
    assert len(names) >= 30
    assert sorted(set(names), key=str.lower) == names
    assert len(text.splitlines()) <= 60


def test_shell_blocks_are_shell() -> None:
    for page in PAGES:
        for block in page.code:
            without_documents = re.sub(r"<<'(\w+)'.*?^\1$", "", block, flags=re.M | re.S)
            for line in without_documents.replace("\\\n", " ").splitlines():
                shlex.split(line, comments=True)  # raises for a quote that is not closed
