"""Checks of this machine: models, processor or GPU, compiled kernels, disk, ports."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy.engine import make_url

from nightjar.checkpoints import CheckpointError, ModelDirectory, check_shards
from nightjar.pipeline.front.doctor.findings import Finding, fault, ok, warning
from nightjar.pipeline.settings import Settings
from nightjar.visible import visible

_LEAST_BYTES = 256 << 20
_FEW_BYTES = 2 << 30
_ASK_S = 30.0
_PORTS = {8000: "nightjar api", 5555: "nightjar flower"}
# In a process of its own, as torch takes seconds to load and may fail to. Compiles nothing.
_ASK_KERNELS = """
import json, os
from nightjar.kernels.native import build
found = {"switch": os.environ.get(build.SWITCH, "auto")}
found["compiler"], found["compiled"] = build.found()
import torch
found["torch"], found["gpus"] = torch.__version__, []
if torch.cuda.is_available():
    for number in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(number)
        found["gpus"].append([of.name, of.total_memory])
print(json.dumps(found))
"""


def check_models(settings: Settings) -> Iterator[Finding]:
    """Whether each model directory can be served; the weights are not read."""
    if not settings.model_paths:
        yield warning(
            "model",
            "none is set: this machine can run neither a planner nor a GPU worker",
            "set NIGHTJAR_MODEL to a model directory, or NIGHTJAR_MODELS to several",
        )
    for name, path in settings.model_paths.items():
        try:
            model = ModelDirectory.open(path)
            check_shards(model.config, settings.shard_count)
        except (CheckpointError, OSError) as error:
            yield fault("model", f"{visible(name)}: {visible(error)}", "correct what it names")
            continue
        size = sum(header.size_bytes for header in model.headers)
        yield ok(
            "model",
            f"{visible(name)}: {model.config.family}, {size / (1 << 30):.2f} GiB of weights, "
            f"{model.config.vocab_size} tokens",
        )


def check_compute(settings: Settings) -> Iterator[Finding]:
    """Whether torch loads, the kernels are compiled, and the GPU that is asked for is there."""
    if settings.engine == "fake":
        yield ok("kernels", "the fake engine needs none")
        return
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_KERNELS],
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield warning("kernels", f"torch did not load within {_ASK_S:.0f} s", "look at the load")
        return
    if asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        yield fault("kernels", f"torch does not load: {visible(last)}", "install Nightjar again")
        return
    found = json.loads(asked.stdout.splitlines()[-1])
    yield from _gpu(settings, found["gpus"]) if _wants_gpu(settings) else _cpu(found)


def _wants_gpu(settings: Settings) -> bool:
    return settings.device != "cpu" or bool(settings.device_list)


def _cpu(found: dict[str, object]) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield ok("processor", f"{cores} cores, torch {found['torch']}")
    if found["switch"] == "torch":
        yield warning(
            "kernels",
            "NIGHTJAR_CPU_KERNELS is torch: the compiled kernels are left out",
            "unset it to compute faster",
        )
    elif found["compiled"]:
        yield ok("kernels", "they are compiled for this processor")
    elif found["compiler"]:
        yield ok("kernels", f"{found['compiler']} compiles them at the first start of a worker")
    else:
        yield warning(
            "kernels",
            "no C++ compiler is here: torch computes, several times slower",
            "install g++ (apt-get install g++), then start the worker again",
        )


def _gpu(settings: Settings, gpus: list[tuple[str, int]]) -> Iterator[Finding]:
    if not gpus:
        yield fault(
            "gpu",
            "torch sees no GPU, and the settings ask for one",
            "install the driver and a torch for it, or set NIGHTJAR_DEVICE=cpu",
        )
        return
    numbers = [int(one) for one in settings.device_list] or [
        int(settings.device.partition(":")[2] or 0)
    ]
    for number in numbers:
        if number >= len(gpus):
            yield fault("gpu", f"there is no GPU {number} of {len(gpus)}", "name one that is there")
        else:
            name, memory = gpus[number]
            yield ok("gpu", f"GPU {number}: {visible(name)}, {memory >> 30} GiB")


def check_disk(settings: Settings) -> Iterator[Finding]:
    """Whether there is room for the database, temporary files and compiled kernels."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    places = {"temporary files": Path(tempfile.gettempdir()), "the cache": cache}
    url = settings.database_url.get_secret_value()
    if url.startswith("sqlite"):
        places["the database"] = Path(make_url(url).database or ".").resolve().parent
    for what, place in places.items():
        there = next((one for one in (place, *place.parents) if one.is_dir()), Path("/"))
        free = shutil.disk_usage(there).free
        message = f"{free / (1 << 30):.1f} GiB are free for {what} in {there}"
        if free < _LEAST_BYTES:
            yield fault("disk", message, "free some space, or move it to another disk")
        elif free < _FEW_BYTES:
            yield warning("disk", message, "free some space")
        else:
            yield ok("disk", message)


def check_ports(settings: Settings) -> Iterator[Finding]:
    """Whether the default ports of the API and of Flower are free."""
    del settings
    for port, command in _PORTS.items():
        with socket.socket() as probe:
            probe.settimeout(1.0)
            taken = probe.connect_ex(("127.0.0.1", port)) == 0
        if taken:
            yield warning(
                "ports",
                f"port {port} is taken, perhaps by `{command}` itself",
                f"if it is another program, give `{command}` another --port",
            )
        else:
            yield ok("ports", f"port {port} is free for `{command}`")
