"""The guide "The first nightly run", whose commands are run as they are written."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT, marked_commands
from tests.services import free_port

pytest.importorskip("nightjar.pipeline.tasks")
# As somebody who closes the terminal; the services are waited for.
TO_ITS_END = "trap 'kill $(jobs -p); wait' EXIT\n"


@pytest.mark.slow
def test_from_nothing_to_a_schedule_that_ran(tmp_path: Path) -> None:
    blocks = marked_commands("docs/guides/first-night.md")
    assert len(blocks) == 5
    examples = tmp_path / "examples"
    ours = shutil.ignore_patterns("data", "*.work", "__pycache__")
    shutil.copytree(ROOT / "examples" / "nightly", examples / "nightly", ignore=ours)
    (examples / "demo_model").symlink_to(ROOT / "examples" / "demo_model")
    commands = "".join(blocks).replace("6390", str(free_port()))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NIGHTJAR_")}
    kept = {"NIGHTJAR_KERNEL_CACHE"} & os.environ.keys()
    environment |= {name: os.environ[name] for name in kept}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    done = subprocess.run(
        ["bash", "-e", "-c", TO_ITS_END + commands],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    logs = {path.name: path.read_text()[-2_000:] for path in tmp_path.glob("*.log")}
    assert done.returncode == 0, (done.stderr, logs)
    assert re.search(r"planned +succeeded", done.stdout)
    users = re.findall(r"^user-\d{4}  \S+ \(\S+\) .+$", done.stdout, re.MULTILINE)
    assert len(users) == 10
    assert done.stdout.count("15 2 * * *") >= 2  # in the list, and in the changes
    assert {path.name for path in tmp_path.glob("*.log")} == {
        *("broker.log", "planner.log", "gpu-worker.log", "tasks.log", "beat.log")
    }
