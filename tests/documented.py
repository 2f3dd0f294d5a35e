"""Which shell blocks of the documents there are, and what runs each of them.

A block has the key (page, first line). `SCENES` are run by `acceptance/test_documented_commands.py`
and `acceptance/test_nightly_example.py`; `BY_NAME` by the tests that they name. `NOT_RUN` is all
else, each with its reason. `unit/test_documented_blocks.py` compares them with the documents.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from textwrap import dedent

from tests.documents import ROOT, pages

Key = tuple[str, str]
SHELL = ("", "bash", "sh", "shell", "console", "zsh")
OTHER_LANGUAGES = ("diff", "ini", "json", "mermaid", "python", "sql", "text", "toml", "yaml")
# Also those of a list's item, which are indented.
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


class Why(StrEnum):
    """Why no test runs a block."""

    GPU = "it needs a GPU"
    CONTAINERS = "it needs Docker"
    INTERNET = "it installs packages from the internet"
    ITS_END = "the test of its page ends the processes in its own way"
    HOURS = "it takes hours on a machine that does nothing else"


def fenced() -> list[tuple[str, str, str]]:
    """Every fenced block: its page, its language, its text."""
    return [
        (page.name, language, dedent(text))
        for page in pages()
        for _, language, text in _FENCE.findall(page.text)
    ]


@cache
def shell_blocks() -> Mapping[Key, str]:
    """Every shell block by its key; AssertionError where two of a page begin alike."""
    found: dict[Key, str] = {}
    for page, language, text in fenced():
        if language in SHELL:
            key = (page, text.splitlines()[0])
            assert key not in found, key
            found[key] = text
    return found


def _of(page: str, *first_lines: str) -> tuple[Key, ...]:
    """The keys of a page's blocks, whose first lines begin like this."""
    name = page if (ROOT / page).exists() else f"docs/{page}.md"
    keys = [key for key in shell_blocks() if key[0] == name]
    found = [next((key for key in keys if key[1].startswith(one)), None) for one in first_lines]
    lost = [one for one, key in zip(first_lines, found, strict=True) if key is None]
    assert not lost, f"{name} has no block that begins with {lost}"
    return tuple(key for key in found if key is not None)


SCENES: Mapping[str, tuple[Key, ...]] = {
    "keys": _of("guides/keys-and-tenants", "nightjar migrate", "export", "nightjar keys list"),
    "tenants": _of("guides/keys-and-tenants", "nightjar tenants create"),
    "client": _of("guides/operations", "nightjar submit"),
    "processes": _of("guides/operations", "export NIGHTJAR_DATABASE_URL"),
    "metrics": _of("guides/monitoring", "NIGHTJAR_METRICS_ADDRESS"),
    "top": _of("guides/monitoring", "nightjar top"),
    "traces": _of("guides/monitoring", "export NIGHTJAR_TRACE_SHARE"),
    "page": _of("guides/page", "nightjar api"),
    "reports": (
        *_of("guides/files", "nightjar run IN.jsonl"),
        *_of("guides/reports", "nightjar report JOB"),
    ),
    "bill": _of("guides/reports", "nightjar bill"),
    "retention": _of("guides/retention", "NIGHTJAR_KEEP_RESULTS", "nightjar purge --dry-run"),
    "export": _of("guides/export", "nightjar export"),
    "schedules": _of(
        "guides/schedules", "nightjar worker tasks", "nightjar schedules apply", "curl -X PUT"
    ),
    "several models": _of("guides/several-models", "export NIGHTJAR_MODELS", "nightjar models"),
    "tables": _of("guides/tables", "nightjar plan"),
    "tuning": _of(
        "guides/tuning", "nightjar tune", "nightjar vectors add", "nightjar vectors list"
    ),
    "adapters": _of("guides/adapters", "nightjar vectors add"),
    "converting": _of("guides/converting", "nightjar convert"),
    "verifying": _of(
        "guides/converting", "nightjar verify models/gpt", "nightjar verify models/gpt --prec"
    ),
    "upgrading": _of("guides/upgrading", "nightjar migrate"),
    "webhooks": _of("guides/webhooks", "curl", "SECRET="),
    "for programs": _of("reference/command-line", "job="),
    "completion": _of("reference/command-line", "nightjar --install-completion"),
    "openapi": _of("reference/openapi", "curl"),
    "nightly": _of(
        "guides/recommendations",
        "source",
        "nightjar run examples/nightly/describe.toml",
        "nightjar run examples/nightly/rank.toml",
        "python examples/nightly/make_data.py --night 2",
    ),
}
BY_NAME: Mapping[str, tuple[Key, ...]] = {
    "acceptance/test_first_night.py": _of(
        "guides/first-night",
        "cat > first-night.toml <<'END'",
        "export NIGHTJAR_DATABASE_URL=sqlite:///$",
        "nightjar schedules apply examples/nightl",
        "python examples/nightly/make_data.py",
        "until nightjar schedules history describ",
    ),
    "acceptance/test_readme.py": _of("README.md", "source .venv"),
    "acceptance/test_backup.py": _of(
        "guides/backup", "python3 -c", "pg_dump", "rm -f nightjar.db", "dropdb"
    ),
}
NOT_RUN: Mapping[Key, Why] = {
    **dict.fromkeys(_of("README.md", "make demo"), Why.INTERNET),
    **dict.fromkeys(_of("guides/first-night", "make demo"), Why.INTERNET),
    **dict.fromkeys(_of("guides/first-night", "kill $(jobs -p)"), Why.ITS_END),
    **dict.fromkeys(_of("guides/operations", "cp .env.example", "docker"), Why.CONTAINERS),
    **dict.fromkeys(_of("guides/operations", ".venv/bin/pip"), Why.INTERNET),
    **dict.fromkeys(_of("guides/monitoring", ".venv/bin/pip"), Why.INTERNET),
    **dict.fromkeys(_of("guides/tables", ".venv/bin/pip install"), Why.INTERNET),
    **dict.fromkeys(_of("guides/gpu", ".venv/bin/pip"), Why.INTERNET),
    **dict.fromkeys(_of("guides/gpu", "echo", "python3 tools/first", "make test-gpu"), Why.GPU),
    **dict.fromkeys(_of("guides/several-gpus", "nightjar worker compute"), Why.GPU),
    **dict.fromkeys(_of("performance", "make bench-peers"), Why.HOURS),
}
MOST_NOT_RUN = 14
"""A block more needs a reason that somebody has read: lower this, do not raise it."""
