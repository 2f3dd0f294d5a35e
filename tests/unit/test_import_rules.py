"""The layout shows the architecture: which room may import which is checked here."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.source_tree import ROOT, python_files, source_files

# Room -> rooms of ours that its files may import. The first entry that matches a file counts.
RECORDS = {
    *(
        f"jobs.{name}"
        for name in (
            "accounts",
            "answer_shapes",
            "asked",
            "records",
            "file_records",
            "batch_records",
            "append_records",
            "overview_records",
            "purge_records",
            "schedule_records",
            "states",
            "vector_records",
            "workers",
            "models",
            "model_choice",
            "errors",
            "equality",
            "lifecycle",
            "events",
            "job_report",
            "report_builder",
            "tallies",
            "tracing",
        )
    )
}
MODELS = {"checkpoints", "kernels", "gpu_worker.models"}
ENGINE = MODELS | {"gpu_worker.engine"}
QUEUE = RECORDS | {
    *("jobs.schedules", "jobs.store", "jobs.webhooks"),
    *("pipeline.metrics", "pipeline.settings", "pipeline.queue"),
    "pipeline.tracing",
}
FILES = RECORDS | {"checkpoints", "jobs.lines", "jobs.store", "pipeline.files"}
EMBEDDED = QUEUE | FILES | {"checkpoints", "pipeline.embedded"}
TASKS = RECORDS | {"checkpoints", "jobs.lines", "pipeline.tables", "pipeline.tasks"}
TASKS |= {"pipeline.written_file"}
RUNNER = QUEUE | FILES | TASKS | {"pipeline.runner"}
RULES: list[tuple[str, set[str]]] = [
    ("jobs/lines/", RECORDS | {"jobs.lines"}),
    ("jobs/store/", RECORDS | {"jobs.store"}),
    ("jobs/webhooks/", RECORDS | {"jobs.webhooks"}),
    ("jobs/schedules/", RECORDS | {"jobs.schedules", "jobs.store"}),
    ("jobs/report/", RECORDS | {"jobs.report"}),
    (
        "jobs/api/",
        RECORDS
        | {"jobs.lines", "jobs.report", "jobs.schedules", "jobs.store", "jobs.webhooks"}
        | {"jobs.api"},
    ),
    ("jobs/", RECORDS),
    ("migrations/", {"jobs.store", "migrations"}),
    ("checkpoints/", {"checkpoints"}),
    ("kernels/", {"kernels"}),
    ("gpu_worker/engine/", ENGINE),
    ("gpu_worker/models/", MODELS),
    ("gpu_worker/verify/", ENGINE | {"gpu_worker.verify"}),
    ("gpu_worker/tuning/", ENGINE | {"gpu_worker.tuning"}),
    ("gpu_worker/shards/", MODELS | {"gpu_worker.shards"}),
    (
        "gpu_worker/compute/",
        ENGINE | {"gpu_worker.compute", "gpu_worker.shards", "gpu_worker.verify"},
    ),
    (
        "gpu_worker/worker/",
        QUEUE
        | {
            "checkpoints",
            "pipeline.planning",
            "gpu_worker.compute.messages",
            "gpu_worker.engine.statistics",
            "gpu_worker.shards",
            "gpu_worker.worker",
        },
    ),
    ("gpu_worker/", set()),
    ("pipeline/metrics/", RECORDS | {"jobs.store", "pipeline.metrics", "pipeline.settings"}),
    ("pipeline/tracing/", RECORDS | {"pipeline.settings", "pipeline.tracing"}),
    ("pipeline/queue/", QUEUE),
    ("pipeline/planning/", QUEUE | {"checkpoints", "jobs.lines", "pipeline.planning"}),
    ("pipeline/files/", FILES),
    ("pipeline/exports/", RECORDS | {"jobs.lines", "jobs.store", "pipeline.exports"}),
    ("pipeline/client/", RECORDS | {"jobs.lines", "pipeline.client"}),
    ("pipeline/tables/", RECORDS | {"jobs.lines", "pipeline.tables"}),
    ("pipeline/tasks/", TASKS),
    (
        "pipeline/schedules/",
        RECORDS | {"jobs.schedules", "jobs.store", "pipeline.schedules", "pipeline.written_file"},
    ),
    ("pipeline/runner/", RUNNER),
    ("pipeline/embedded/", EMBEDDED),
    (
        "pipeline/front/",
        EMBEDDED
        | RUNNER
        | {
            *("jobs.api", "jobs.report", "pipeline.client", "pipeline.planning"),
            *("pipeline.schedules", "pipeline.exports", "pipeline.front"),
        },
    ),
    ("pipeline/settings/", {"pipeline.settings"}),
    ("pipeline/", set()),
    ("nightjar/__main__.py", {"pipeline.front"}),
    ("nightjar/__init__.py", {"pipeline.client"}),
    ("nightjar/children.py", set()),
    ("nightjar/compute_config.py", set()),
    ("nightjar/groups.py", set()),
    ("nightjar/logs.py", set()),
    ("nightjar/process.py", set()),
    ("nightjar/requests.py", set()),
    ("nightjar/visible.py", set()),
]
# What every room may import; it imports nothing of ours itself.
FOR_ALL = {
    *("__version__", "children", "compute_config", "groups", "logs", "process", "requests"),
    "visible",
}
# Third-party packages that the engine and the kernels may import: a bare GPU machine has no more.
ENGINE_PACKAGES = {"torch", "numpy", "tokenizers", "safetensors", "jinja2", "cupy", "nightjar"}
# Within the kernels: operands know no backend, and backends know neither the ops nor each other.
# All of them may fall back to torch's reference.
OPERANDS = {
    *("operand", "operands", "low_rank", "layout", "heads", "step_state"),
    *("upload", "cache_folder"),
}
KERNEL_RULES: list[tuple[str, set[str]]] = [
    *((f"kernels/{name}.py", OPERANDS) for name in sorted(OPERANDS)),
    ("kernels/reference/", OPERANDS | {"reference"}),
    ("kernels/native/", OPERANDS | {"reference", "native"}),
    ("kernels/cuda/", OPERANDS | {"reference", "cuda"}),
]
ENGINE_ROOMS = (
    "nightjar/compute_config.py",
    "nightjar/groups.py",
    "nightjar/requests.py",
    "kernels/",
    "checkpoints/",
    "gpu_worker/engine/",
    "gpu_worker/models/",
)
# Only these may import a backend: the ops choose it, tests and benchmarks look at one of them.
BACKENDS = ("reference", "native", "cuda")
BACKEND_USERS = (
    "kernels/",
    "tests/",
    "benchmarks/gpu/",
    "tools/gpu_hour/",
)


@cache
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


@pytest.mark.parametrize("folder", sorted({str(Path(name).parent) for name in source_files()}))
def test_imports_stay_in_their_rooms(folder: str) -> None:
    names = [name for name in source_files() if str(Path(name).parent) == folder]
    found = {name: violations(name, imports(name)) for name in names}
    assert {name: modules for name, modules in found.items() if modules} == {}


def test_engine_needs_no_queue_and_no_database() -> None:
    names = [name for name in source_files() if name.startswith(ENGINE_ROOMS)]
    assert names
    found = {(name, module.split(".")[0]) for name in names for module in imports(name)}
    stdlib = set(sys.stdlib_module_names)
    assert {(name, top) for name, top in found if top not in ENGINE_PACKAGES | stdlib} == set()


def backends(modules: list[str]) -> list[str]:
    """What of a backend is among imported names."""
    roots = [f"nightjar.kernels.{backend}" for backend in BACKENDS]
    return [m for m in modules if any(m == root or m.startswith(f"{root}.") for root in roots)]


def test_only_the_ops_know_the_backends() -> None:
    others = [name for name in python_files() if not name.startswith(BACKEND_USERS)]
    assert "gpu_worker/engine/loop.py" in others
    found = {name: backends(imports(name)) for name in others}
    assert {name: modules for name, modules in found.items() if modules} == {}
    assert backends(["nightjar.kernels.cuda.norm.layer_norm", "nightjar.kernels.native"]) == [
        "nightjar.kernels.cuda.norm.layer_norm",
        "nightjar.kernels.native",
    ]


@pytest.mark.parametrize(("place", "allowed"), KERNEL_RULES)
def test_operands_and_backends_know_no_other_backend(place: str, allowed: set[str]) -> None:
    names = [name for name in source_files() if name.startswith(place)]
    assert names
    room = "nightjar.kernels."
    found = {
        (name, module)
        for name in names
        for module in imports(name)
        if module.startswith(room) and module.removeprefix(room).split(".")[0] not in allowed
    }
    assert found == set()


def circle(files: dict[str, set[str]]) -> list[str]:
    """Files that import each other in turn, the first one again at the end; empty if none do."""
    try:
        TopologicalSorter(files).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_a_violation_is_seen() -> None:
    assert violations("jobs/api/upload.py", ["nightjar.pipeline.settings.Settings"]) == [
        "pipeline.settings.Settings"
    ]
    assert violations("gpu_worker/engine/loop.py", ["nightjar.gpu_worker.worker.tasks.app"]) == [
        "gpu_worker.worker.tasks.app"
    ]


@pytest.mark.parametrize(
    ("module", "spared"),
    [
        ("pipeline.front.cli", "torch"),
        ("pipeline.planning.tasks", "torch"),
        ("gpu_worker.worker.tasks", "torch alembic"),
        ("gpu_worker.compute", "torch"),  # for the fake engine
        ("pipeline.queue.celery_command", "flower"),
        ("gpu_worker.worker.starting", "celery sqlalchemy"),
        ("pipeline.queue.clock", "sqlalchemy"),
        ("pipeline.embedded.run", "redis"),
    ],
)
def test_what_a_process_does_not_need_is_not_loaded(module: str, spared: str) -> None:
    code = f"import sys, nightjar.{module}; print(*(sys.modules.keys() & set({spared.split()})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout == "\n"


def imported_files(name: str, files: set[str]) -> set[str]:
    """The files of ours that a file imports, whenever it does so and whatever for."""
    found = set()
    for module in imports(name):
        parts = module.split(".")
        # The longest name that is a file: what follows are names within it.
        for length in range(len(parts), 1, -1):
            path = "/".join(parts[1:length])
            file = next(
                (one for one in (f"{path}.py", f"{path}/__init__.py") if one in files), None
            )
            if parts[0] == "nightjar" and file is not None:
                found.add(file)
                break
    return found - {name}


def test_no_file_leads_back_to_itself() -> None:
    """Imports within functions and for types alone count, too."""
    files = set(source_files())
    graph = {name: imported_files(name, files) for name in files}
    assert sum(map(len, graph.values())) > len(files)
    assert circle(graph) == []


def test_a_circle_is_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
