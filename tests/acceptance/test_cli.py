"""The command line itself: help, settings and addresses that cannot be used."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import httpx
import numpy as np
import pytest
import typer
from rich.text import Text
from safetensors.numpy import save_file
from typer.testing import CliRunner

from nightjar import __version__ as nightjar_version
from nightjar.jobs.store import Store
from nightjar.pipeline.embedded.summary import RunSummary
from nightjar.pipeline.front.cli import app, console, processes
from nightjar.pipeline.front.cli.run import _exit
from tests.adapters import gpt2_sizes, save_adapter
from tests.golden_help import FOLDER, help_texts
from tests.jobs import submit
from tests.processes import nightjar, nightjar_here, start_nightjar, wait_until
from tests.services import free_port

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
COMPLETE = {"_NIGHTJAR_COMPLETE": "complete_bash"}
COMMANDS = [
    "run",
    "plan",
    "worker",
    "beat",
    "flower",
    "api",
    "health",
    "submit",
    "status",
    "results",
    "cancel",
    "pause",
    "resume",
    "retry",
    "models",
    "vectors",
    "tune",
    "migrate",
    "keys",
    "tenants",
    "shares",
    "openapi",
    "task",
]


def test_help_names_every_command() -> None:
    done = nightjar("--help")
    assert done.returncode == 0
    assert all(f" {command} " in done.stdout for command in COMMANDS)


def test_the_version_is_told_and_nothing_else() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"nightjar {nightjar_version}\n")


def test_exit_statuses_are_those_that_the_help_names() -> None:
    told = typer.main.get_command(app).commands["run"].help
    for status, meaning in (
        (console.EXIT_RUN, "the run could not continue"),
        (console.EXIT_USAGE, "unusable arguments"),
        (console.EXIT_ROWS_FAILED, "some rows failed"),
        (console.EXIT_NO_ROW_SUCCEEDED, "no row succeeded"),
    ):
        assert f"{status} {meaning}" in " ".join(told.split())


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
        (["worker", "plan"], {"NIGHTJAR_MODELS": f"demo={DEMO},b=/no/dir"}, "the model 'b'"),
        (
            ["vectors", "add", "v", "f"],
            {"NIGHTJAR_MODELS": f"a={DEMO},b={DEMO}/"},
            "one of 'a', 'b'",
        ),
        (["worker", "compute", "--engine=real"], {}, "NIGHTJAR_ENGINE"),
        (["worker", "compute", "--device=cpu", "--devices=0"], {}, "give one of them"),
        (["api"], {"NIGHTJAR_DTYPE": "int4"}, "NIGHTJAR_DTYPE"),
        (["flower", "--address=0.0.0.0"], {}, "NIGHTJAR_FLOWER_AUTH"),
        (["health", "flower"], {}, "use one of planner, worker, beat"),
        (["beat"], {"NIGHTJAR_BROKER_URL": "127.0.0.1:6379/0"}, "begins with redis://"),
        (["flower"], {"NIGHTJAR_FLOWER_AUT": "owl:hoot"}, "did you mean NIGHTJAR_FLOWER_AUTH?"),
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
    done = nightjar_here(*arguments)
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


def test_postgresql_without_its_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As after `make demo`: the driver is an extra."""
    (tmp_path / "psycopg.py").write_text("raise ImportError('not installed')")
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", paths)
    monkeypatch.setenv("NIGHTJAR_DATABASE_URL", "postgresql://owl:secret@127.0.0.1/night")
    done = nightjar("migrate")
    assert done.returncode == 1
    assert "PostgreSQL needs the driver psycopg: pip install 'nightjar-batch[postgres]'" in (
        done.stderr
    )
    assert "Traceback" not in done.stderr
    monkeypatch.setattr(console, "find_spec", lambda _: None)
    worker = CliRunner().invoke(app, ["worker", "plan"])
    assert worker.exit_code == 1
    assert "nightjar-batch[postgres]" in worker.stderr


@pytest.mark.parametrize("command", ["flower", "api"])
def test_a_taken_port_is_told_in_a_sentence(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = nightjar(command, f"--port={port}")
    assert done.returncode == 1
    assert f"--port={port} is taken: end what listens there" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_of_elsewhere_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTJAR_API_KEY", "owls-open-the-api-with-32-letters")
    done = nightjar("api", "--host=192.0.2.7", f"--port={free_port()}")
    assert done.returncode == 1
    assert "--host=192.0.2.7" in done.stderr
    assert "is no address of this machine" in done.stderr


def test_flower_shows_its_metrics_to_nobody_without_the_password(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NIGHTJAR_FLOWER_AUTH", "owl:hoot")
    monkeypatch.setenv("NIGHTJAR_BROKER_URL", "redis://127.0.0.1:1/0")
    url = f"http://127.0.0.1:{(port := free_port())}"

    def status(path: str, auth: tuple[str, str] | None = None) -> int:
        try:
            return httpx.get(url + path, auth=auth, timeout=5).status_code
        except httpx.TransportError:
            return 0

    flower = start_nightjar("flower", f"--port={port}", log=tmp_path / "log")
    try:
        wait_until("Flower", lambda: status("/healthcheck") == 200, 30)
        assert [status(path) for path in ("/metrics", "/tasks")] == [401, 401]
        assert status("/metrics", ("owl", "howl")) == 401
        assert status("/metrics", ("owl", "hoot")) == 200
    finally:
        flower.kill()
        flower.wait()


def test_commands_that_are_fine_reach_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower may be opened to others with a password, and `--devices` may stand alone."""
    started: list[list[str]] = []
    monkeypatch.setattr(processes, "become", started.append)
    for name in ("NIGHTJAR_DEVICES", "FLOWER_BASIC_AUTH"):  # the commands set them
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("NIGHTJAR_FLOWER_AUTH", "owl:hoot")
    monkeypatch.setenv("NIGHTJAR_ENGINE", "fake")
    monkeypatch.setenv("NIGHTJAR_MODEL", str(DEMO))
    for arguments in (["flower", "--address=0.0.0.0"], ["worker", "compute", "--devices=0"]):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
    assert ["flower" in command for command in started] == [True, False]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ({"completed": 2}, 0),
        ({"failed": 1, "completed": 1}, 3),
        ({"cancelled": 1, "completed": 1}, 3),
    ],
)
def test_a_run_of_which_not_every_row_succeeded_says_so(
    outcomes: dict[str, int], status: int, store: Store
) -> None:
    job = store.jobs.get(submit(store, [{"prompt": "a"}] * 2))
    ended = replace(job, **outcomes)
    summary = RunSummary(ended, "out", "errors", False, 0, 1.0, 0.5, 0.1, None, ["fp32"])
    if status:
        with pytest.raises(typer.Exit) as ending:
            _exit(summary)
        assert ending.value.exit_code == status
    else:
        _exit(summary)


def test_registered_vectors_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    width = json.loads((DEMO / "config.json").read_text())["n_embd"]
    save_file({"vectors": np.ones((3, width), np.float32)}, tmp_path / "v.safetensors")
    monkeypatch.setenv("NIGHTJAR_DATABASE_URL", f"sqlite:///{tmp_path}/night.db")
    monkeypatch.setenv("NIGHTJAR_MODEL", str(DEMO))
    Store(f"sqlite:///{tmp_path}/night.db").migrate()
    done = nightjar("vectors", "add", "tuned", str(tmp_path / "v.safetensors"))
    assert done.stdout == "tuned, version 1: 3 vectors\n"
    again = nightjar_here("vectors", "add", "tuned", tmp_path / "v.safetensors", "--json")
    (line,) = again.stdout.splitlines()
    assert json.loads(line) == {"name": "tuned", "version": 1, "length": 3, "kind": "vectors"}
    folder = save_adapter(tmp_path / "polite", gpt2_sizes(4, width, 4 * width), rank=2)
    added = CliRunner().invoke(app, ["vectors", "add", "polite", str(folder)])
    assert added.output == "polite, version 1: a LoRA adapter of rank 2\n"
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    refused = CliRunner().invoke(app, ["vectors", "add", "polite", str(folder)])
    assert refused.exit_code == 2
    assert "a pickle, which is never read" in refused.output
    (folder / "adapter_model.bin").rename(folder / "adapter_model.safetensors")
    monkeypatch.setenv("NIGHTJAR_SHARDS", "3")
    refused = CliRunner().invoke(app, ["vectors", "add", "polite", str(folder)])
    assert refused.exit_code == 2
    told = " ".join(refused.output.split())
    assert "is a LoRA adapter, which is not served" in told
    assert "serve it without shards" in told
    still = CliRunner().invoke(app, ["vectors", "add", "tuned", str(tmp_path / "v.safetensors")])
    assert still.output == "tuned, version 1: 3 vectors\n"


def test_versions_are_listed_tagged_and_rolled_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    width = json.loads((DEMO / "config.json").read_text())["n_embd"]
    monkeypatch.setenv("NIGHTJAR_DATABASE_URL", f"sqlite:///{tmp_path}/night.db")
    monkeypatch.setenv("NIGHTJAR_MODEL", str(DEMO))
    Store(f"sqlite:///{tmp_path}/night.db").migrate()

    def run(*arguments: str, status: int = 0) -> str:
        done = CliRunner().invoke(app, ["vectors", *arguments])
        assert done.exit_code == status, done.output
        return done.output

    for number in (1, 2):
        save_file({"v": np.full((3, width), number, np.float32)}, tmp_path / "v.safetensors")
        run("add", "tuned", str(tmp_path / "v.safetensors"), "--tag", f"t{number}")
    assert run("tag", "tuned", "live") == "tuned@live is version 2\n"
    assert run("rollback", "tuned") == "tuned@latest is version 1\n"
    assert "no version before the latest" in run("rollback", "tuned", status=2)
    assert "cannot be used" in run("tag", "tuned", "3", status=2)
    assert "no version 7" in run("tag", "tuned", "live", "--version", "7", status=2)
    rows = json.loads(run("list", "tuned", "--json"))
    assert [(one["version"], one["aliases"]) for one in rows] == [
        (2, ["live", "t2"]),
        (1, ["latest", "t1"]),
    ]
    assert [line.split()[:2] for line in run("list").splitlines()] == [
        ["name", "version"],
        ["tuned", "1"],
    ]


def test_the_help_of_every_command_is_the_one_that_was_agreed() -> None:
    """After a change on purpose: python -m tests.golden_help."""
    agreed = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.txt")}
    texts = help_texts()
    assert sorted(agreed) == sorted(texts)
    assert {name for name in texts if texts[name] != agreed[name]} == set()
    assert {f"nightjar-{command}.txt" for command in COMMANDS} <= set(texts)


def leaves(group: click.Command, path: tuple[str, ...] = ()) -> Iterator[click.Command]:
    """Each command that does something, under its whole name."""
    inner = getattr(group, "commands", {})
    for name, command in inner.items():
        yield from leaves(command, (*path, name))
    if not inner:
        group.name = " ".join(path)
        yield group


LEAVES = list(leaves(typer.main.get_command(app)))


@pytest.mark.parametrize("command", LEAVES, ids=[str(one.name) for one in LEAVES])
def test_the_help_of_every_command_has_an_example_that_it_understands(
    command: click.Command,
) -> None:
    """Words before `nightjar` set variables, and `>` and `)` end what is the command's own."""
    examples = re.findall(r"Example: .*?\bnightjar (.+)", command.help or "")
    assert examples
    for example in examples:
        words = shlex.split(example.partition(">")[0].rstrip(" )"))
        name = str(command.name).split()
        assert words[: len(name)] == name
        assert command.make_context(example, words[len(name) :]).args == []


def test_every_command_that_tells_something_tells_it_as_json() -> None:
    """The others run until they are ended, print JSON anyway, or tell nothing but their status."""
    without = {
        str(command.name)
        for command in LEAVES
        if not any("--json" in one.opts for one in command.params)
    }
    long_running = {"api", "beat", "flower", "top", "worker"}
    of_json = {"openapi", "schedules schema", "task schema"}
    assert without == long_running | of_json | {"health", "migrate"}


def test_a_shell_completes_commands_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bash asks, through the script that `--show-completion` prints."""
    words = {"nightjar sta": "status", "nightjar status --wa": "--watch"}
    for line, wanted in words.items():
        asked = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), **COMPLETE}
        for name, value in asked.items():
            monkeypatch.setenv(name, value)
        assert nightjar().stdout.split() == [wanted]
    monkeypatch.delenv("_NIGHTJAR_COMPLETE")
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    script = nightjar("--show-completion", "bash").stdout
    assert "_NIGHTJAR_COMPLETE=complete_bash" in script
    checked = subprocess.run(
        ["bash", "-c", f"{script}\ncomplete -p nightjar"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert checked.stdout.strip().endswith("nightjar")
