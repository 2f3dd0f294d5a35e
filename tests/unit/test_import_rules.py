"""The layout shows the architecture: which room may import which is checked here."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Room -> rooms of ours that its files may import. The first entry that matches a file counts.
MODELS = {"checkpoints", "kernels", "gpu_worker.models"}
ENGINE = MODELS | {"gpu_worker.engine"}
RULES: list[tuple[str, set[str]]] = [
    ("jobs/", {"jobs"}),
    ("migrations/", {"jobs", "migrations"}),
    ("checkpoints/", {"checkpoints"}),
    ("kernels/", {"kernels"}),
    ("gpu_worker/engine/", ENGINE),
    ("gpu_worker/models/", MODELS),
    (
        "gpu_worker/compute.py",
        ENGINE
        | {
            "gpu_worker.fake_engine",
            "gpu_worker.messages",
            "gpu_worker.model_engine",
            "gpu_worker.shards",
            "gpu_worker.translation",
        },
    ),
    ("gpu_worker/model_engine.py", ENGINE | {"gpu_worker.shards"}),
    ("gpu_worker/shards/", MODELS | {"gpu_worker.shards"}),
    ("gpu_worker/fake_engine.py", ENGINE),
    ("gpu_worker/translation.py", ENGINE | {"gpu_worker.messages"}),
    ("gpu_worker/", {"jobs", "pipeline", "checkpoints", "gpu_worker"}),
    ("pipeline/", {"jobs", "checkpoints", "pipeline"}),
    ("nightjar/__main__.py", {"pipeline"}),
    ("nightjar/logs.py", set()),
    ("nightjar/process.py", set()),
    ("nightjar/requests.py", set()),
]
# What every room may import; it imports nothing of ours itself.
FOR_ALL = {"__version__", "logs", "process", "requests"}
# Third-party packages that the engine and the kernels may import: a bare GPU machine has no more.
ENGINE_PACKAGES = {"torch", "numpy", "tokenizers", "safetensors", "jinja2", "cupy", "nightjar"}
ENGINE_ROOMS = (
    "nightjar/requests.py",
    "kernels/",
    "checkpoints/",
    "gpu_worker/engine/",
    "gpu_worker/models/",
)


def source_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return [name for name in listed if name.startswith(tuple(rule for rule, _ in RULES))]


def imports(name: str) -> list[str]:
    """Every module that a file imports, by its full name."""
    path = ROOT / name
    package = ["nightjar", *Path(name).with_suffix("").parts[:-1]]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{module}.{alias.name}" for alias in node.names]
    return found


def violations(name: str, modules: list[str]) -> list[str]:
    allowed = next(rooms for rule, rooms in RULES if name.startswith(rule))
    ours = [
        module.removeprefix("nightjar.") for module in modules if module.startswith("nightjar.")
    ]
    return [
        module
        for module in ours
        if module.split(".")[0] not in FOR_ALL
        and not any(module == room or module.startswith(f"{room}.") for room in allowed)
    ]


def test_rooms_are_found() -> None:
    assert {name.split("/")[0] for name in source_files()} >= {
        "jobs",
        "migrations",
        "checkpoints",
        "kernels",
        "gpu_worker",
        "pipeline",
    }


@pytest.mark.parametrize("name", source_files())
def test_imports_stay_in_their_rooms(name: str) -> None:
    assert violations(name, imports(name)) == []


@pytest.mark.parametrize("name", [n for n in source_files() if n.startswith(ENGINE_ROOMS)])
def test_engine_needs_no_queue_and_no_database(name: str) -> None:
    top = {module.split(".")[0] for module in imports(name)}
    assert top - set(sys.stdlib_module_names) <= ENGINE_PACKAGES


def test_a_violation_is_seen() -> None:
    assert violations("jobs/api/upload.py", ["nightjar.pipeline.settings.Settings"]) == [
        "pipeline.settings.Settings"
    ]
    assert violations("gpu_worker/engine/loop.py", ["nightjar.gpu_worker.tasks.app"]) == [
        "gpu_worker.tasks.app"
    ]


@pytest.mark.parametrize(
    ("module", "spared"),
    [
        ("pipeline.cli", "torch"),
        ("pipeline.tasks", "torch"),
        ("gpu_worker.tasks", "torch"),
        ("gpu_worker.compute", "torch"),  # for the fake engine
        ("pipeline.celery_command", "flower"),
        ("gpu_worker.tasks", "alembic"),
    ],
)
def test_what_a_process_does_not_need_is_not_loaded(module: str, spared: str) -> None:
    code = f"import sys, nightjar.{module}; sys.exit({spared!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
