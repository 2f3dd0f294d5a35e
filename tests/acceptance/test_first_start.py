"""`nightjar run` with a damaged model: refused at its first start, unless --verify off is given."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nightjar.kernels.cache_folder import cache_folder

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"


def run(folder, *options):
    """Run two prompts with the model in the folder, as a user without any setting does."""
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions"}
        | {"body": {"prompt": f"사용자: {i}", "max_tokens": 3, "temperature": 0}}
        for i in range(2)
    ]
    source = folder / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NIGHTJAR_")}
    own = {
        "XDG_CACHE_HOME": str(folder / "cache"),
        "NIGHTJAR_KERNEL_CACHE": str(cache_folder()),
    }
    words = ["run", source, "--model", folder / "model", "--out", folder / "out.jsonl", *options]
    return subprocess.run(
        [sys.executable, "-m", "nightjar", *map(str, words)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=kept | own,
    )


@pytest.mark.slow
def test_a_damaged_model_answers_only_if_it_is_told_to(tmp_path):
    shutil.copytree(DEMO, tmp_path / "model")
    weights = load_file(DEMO / "model.safetensors")
    weights["transformer.wte.weight"] = torch.roll(weights["transformer.wte.weight"], 1, 0)
    save_file(weights, tmp_path / "model" / "model.safetensors")
    refused = run(tmp_path)
    assert refused.returncode == 1
    assert "is not in order: loss" in refused.stderr
    assert "nightjar verify" in refused.stderr
    assert not (tmp_path / "out.jsonl").exists()
    assert [entry.suffix for entry in (tmp_path / "cache/nightjar/verified").iterdir()] == [".json"]
    told = run(tmp_path, "--verify", "off")
    assert told.returncode == 0, told.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
