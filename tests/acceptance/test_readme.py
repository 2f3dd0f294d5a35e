"""The commands of README's first five minutes, run as they are written."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.documents import ROOT, marked_commands


def test_the_first_own_file(tmp_path: Path) -> None:
    (block,) = marked_commands("README.md")
    # `source` activates the environment that runs the tests, wherever it is.
    bin_folder = tmp_path / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "activate").write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NIGHTJAR_")}
    kept = {"NIGHTJAR_KERNEL_CACHE"} & os.environ.keys()
    environment |= {name: os.environ[name] for name in kept}

    done = subprocess.run(
        ["bash", "-e", "-c", block],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line) for line in lines]
    assert [answer["custom_id"] for answer in answers] == ["talk-1", "dish-1"]
    assert answers[0]["response"]["body"]["choices"][0]["finish_reason"] == "stop"
    best = answers[1]["response"]["body"]["results"][0]
    assert best["index"] == 0  # 된장찌개
    assert json.loads(done.stdout.splitlines()[0]) == answers[0]
