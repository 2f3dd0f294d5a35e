"""The command line itself: help, settings and addresses that cannot be used."""

from pathlib import Path

import pytest
import typer
from rich.text import Text

from nightjar.pipeline.cli import app
from tests.processes import nightjar

COMMANDS = [
    "run",
    "worker",
    "beat",
    "flower",
    "api",
    "submit",
    "status",
    "results",
    "cancel",
    "pause",
    "resume",
    "retry",
    "vectors",
    "migrate",
]


def test_help_names_every_command() -> None:
    done = nightjar("--help")
    assert done.returncode == 0
    assert all(f" {command} " in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_loses_nothing_to_markup(command: str) -> None:
    """Rich takes a word in square brackets for a style, and leaves it out."""
    found = typer.main.get_command(app).commands[command]
    for told in (found.help, *(getattr(parameter, "help", None) for parameter in found.params)):
        assert Text.from_markup(told or "").plain == (told or "")


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["worker", "compute"], {"NIGHTJAR_WORKER_THREADS": "many"}, "NIGHTJAR_WORKER_THREADS"),
        (["worker", "plan"], {}, "NIGHTJAR_MODEL"),
        (["worker", "plan"], {"NIGHTJAR_MODEL": "/no/such/model"}, "/no/such/model"),
        (["worker", "compute", "--engine=real"], {}, "NIGHTJAR_ENGINE"),
        (["api"], {"NIGHTJAR_DTYPE": "int4"}, "NIGHTJAR_DTYPE"),
        (["flower", "--address=0.0.0.0"], {}, "NIGHTJAR_FLOWER_AUTH"),
        (["run", "x.jsonl", "--model=m", "--out=o", "--prompt-vector=v"], {}, "NAME=FILE"),
    ],
)
def test_what_cannot_be_used_is_named(
    arguments: list[str],
    variables: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = nightjar(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_database_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NIGHTJAR_DATABASE_URL", f"mysql://owl:secret@host/{tmp_path.name}")
    done = nightjar("migrate")
    assert done.returncode == 1
    assert "use SQLite or PostgreSQL" in done.stderr
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr
