"""A million results flow through each sink in bounded memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROWS = 1_000_000
MOST_MIB = 300
LEAST_ROWS_PER_S = 3_000  # far below what is measured: the machine may be busy


def cost(config: dict[str, Any], **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.tables", json.dumps(config), str(ROWS)]
    run = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, **environment}
    )
    told: dict[str, Any] = json.loads(run.stdout)
    return told


def check(told: dict[str, Any]) -> None:
    assert told["failure"] is None
    assert told["peak_mib"] < MOST_MIB
    assert told["rows_per_s"] > LEAST_ROWS_PER_S


@pytest.mark.slow
@pytest.mark.parametrize("target", ["out.jsonl", "out.parquet", "out/"])
def test_files_are_written_in_bounded_memory(tmp_path: Path, target: str) -> None:
    kind = "jsonl" if target == "out.jsonl" else "parquet"
    check(cost({kind: f"{tmp_path}/{target}"}))


@pytest.mark.slow
def test_tables_are_written_in_bounded_memory(database_url: str) -> None:
    config = {"sql": {"url": "env:SINK_URL", "table": "answers"}}
    check(cost(config, SINK_URL=database_url))
