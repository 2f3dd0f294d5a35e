"""docker-compose.yml as an operator reads it, before anything is started."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.compose_file import ComposeError, read_compose, required_variables

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = dict.fromkeys(required_variables(), "x")
OURS = {"migrate", "api", "planner", "gpu-worker", "cuda-worker", "beat", "tasks", "flower"}


def test_ports_are_open_to_this_machine_alone() -> None:
    ports = {name: service.raw.get("ports") for name, service in read_compose(VARIABLES).items()}
    published = {name: port for name, port in ports.items() if port}
    assert published == {"api": ["127.0.0.1:8000:8000"], "flower": ["127.0.0.1:5555:5555"]}


def test_every_secret_is_asked_for_and_explained() -> None:
    example = (ROOT / ".env.example").read_text().splitlines()
    assert {line.removesuffix("=") for line in example if line.endswith("=")} == set(VARIABLES)
    for name in VARIABLES:
        with pytest.raises(ComposeError, match=name):
            read_compose(VARIABLES | {name: ""})
    for file in (".gitignore", ".dockerignore"):
        assert ".env" in (ROOT / file).read_text().splitlines()


def test_only_the_api_has_its_key() -> None:
    """It listens on all interfaces of its container, and does not start without one."""
    services = read_compose(VARIABLES)
    assert "--host=0.0.0.0" in services["api"].command
    with_key = {name for name in services if "NIGHTJAR_API_KEY" in services[name].environment}
    assert with_key == {"api"}


def test_nothing_starts_before_what_it_needs() -> None:
    services = read_compose(VARIABLES)
    assert services["migrate"].depends_on == {"postgres": "service_healthy"}
    for name in ("api", "planner", "gpu-worker", "cuda-worker"):
        assert services[name].depends_on == {
            "migrate": "service_completed_successfully",
            "valkey": "service_healthy",
        }
    # It takes its work from SQL.
    assert services["tasks"].depends_on == {"migrate": "service_completed_successfully"}
    for name in ("beat", "flower"):
        assert services[name].depends_on == {"valkey": "service_healthy"}


def test_what_ends_is_started_again() -> None:
    restart = {name: service.raw["restart"] for name, service in read_compose(VARIABLES).items()}
    assert restart.pop("migrate") == "no"
    assert set(restart.values()) == {"unless-stopped"}
    assert set(restart) == OURS - {"migrate"} | {"postgres", "valkey"}


def test_one_image_one_clock_and_a_volume_where_postgres_18_wants_it() -> None:
    services = read_compose(VARIABLES)
    images = {
        (services[name].raw["image"], services[name].raw["pull_policy"])
        for name in OURS - {"cuda-worker"}
    }
    assert images == {("nightjar", "build")}
    clocks = [name for name, service in services.items() if "beat" in service.command]
    assert clocks == ["beat"]
    assert services["postgres"].raw["volumes"] == ["postgres:/var/lib/postgresql"]
    # valkey-cli reads its password from the environment; the check must see the same one.
    valkey = services["valkey"]
    password = valkey.command[valkey.command.index("--requirepass") + 1]
    assert valkey.environment == {"VALKEYCLI_AUTH": password}


def test_a_profile_reserves_a_gpu_and_computes_on_it() -> None:
    """And the worker of the other profile does not run beside it."""
    services = read_compose(VARIABLES)
    cpu, gpu = services["gpu-worker"], services["cuda-worker"]
    assert (cpu.raw["profiles"], gpu.raw["profiles"]) == (["cpu"], ["gpu"])
    assert "COMPOSE_PROFILES=cpu" in (ROOT / ".env.example").read_text().splitlines()
    assert gpu.command == cpu.command
    assert gpu.environment == cpu.environment | {"NIGHTJAR_DEVICE": "cuda"}
    (device,) = gpu.raw["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert (gpu.raw["image"], gpu.raw["pull_policy"]) == ("nightjar-cuda", "build")
    assert gpu.raw["build"]["args"] == {"EXTRAS": "postgres,gpu"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"postgres", "gpu"} <= set(extras["optional-dependencies"])
    assert '".[${EXTRAS}]"' in (ROOT / "Dockerfile").read_text()


def test_logs_memory_and_processes_of_every_service_are_bounded() -> None:
    for name, service in read_compose(VARIABLES).items():
        assert service.raw["logging"]["options"] == {"max-size": "10m", "max-file": "3"}, name
        assert service.raw["mem_limit"][-1] in "gm", name
        assert service.raw["pids_limit"] >= 512, name
    valkey = read_compose(VARIABLES)["valkey"].command
    assert valkey[valkey.index("--maxmemory") + 1] == "384mb"  # below its mem_limit


def test_every_service_that_stays_is_asked_for_its_health() -> None:
    asked = {
        name: service.raw["healthcheck"]["test"]
        for name, service in read_compose(VARIABLES).items()
        if "healthcheck" in service.raw
    }
    assert set(asked) == set(read_compose(VARIABLES)) - {"migrate"}
    for name, part in (
        ("planner", "planner"),
        ("gpu-worker", "worker"),
        ("cuda-worker", "worker"),
        ("beat", "beat"),
        ("tasks", "tasks"),
    ):
        assert asked[name] == ["CMD", "nightjar", "health", part]


def test_the_task_runner_has_its_folder_and_what_reads_tables() -> None:
    tasks = read_compose(VARIABLES)["tasks"]
    assert tasks.environment["NIGHTJAR_TASK_FOLDER"] == "/tasks"
    assert "./tasks:/tasks" in tasks.raw["volumes"]
    assert "ARG EXTRAS=postgres,tables" in (ROOT / "Dockerfile").read_text().splitlines()
    for file in (".gitignore", ".dockerignore"):
        assert ".env.tasks" in (ROOT / file).read_text().splitlines()


def test_images_of_others_are_named_by_digest() -> None:
    """A tag may come to mean another image."""
    services = read_compose(VARIABLES)
    (python,) = re.findall(r"^ARG PYTHON_IMAGE=(.*)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert "FROM ${PYTHON_IMAGE}" in (ROOT / "Dockerfile").read_text().splitlines()
    for image, tag in (
        (services["postgres"].raw["image"], "postgres:18"),
        (services["valkey"].raw["image"], "valkey/valkey:9"),
        (python, "python:3.11-slim"),
    ):
        assert re.fullmatch(re.escape(tag) + "@sha256:[0-9a-f]{64}", image)


def test_an_operator_may_name_other_images() -> None:
    given = VARIABLES | {"POSTGRES_IMAGE": "postgres@sha256:1", "VALKEY_IMAGE": "valkey@sha256:2"}
    services = read_compose(given)
    images = [services[name].raw["image"] for name in ("postgres", "valkey")]
    assert images == ["postgres@sha256:1", "valkey@sha256:2"]
