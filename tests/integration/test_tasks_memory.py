"""A million rows of one Parquet row group are rendered in memory that stays flat."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tasks import write_task

ROWS = 1_000_000
MOST_BYTES = 300 << 20

RENDER = """
import json, sys, time
from pathlib import Path
from nightjar.pipeline.tasks.opening import open_source
from nightjar.pipeline.tasks.rendering import Renderer
from nightjar.pipeline.tasks.task_file import read_task

def peak():
    # Not of getrusage: that one begins with the memory of the process that started this one.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

file = read_task(Path(sys.argv[1]))
source = open_source(file, {})
renderer = Renderer(file.task, source.schema)
early = 0
began = time.perf_counter()
for count, row in enumerate(renderer.rows(source), 1):
    if count == 50_000:
        early = peak()
seconds = time.perf_counter() - began
print(json.dumps({"rows": count, "early": early, "peak": peak(), "rows_per_s": count / seconds}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("row_group", [ROWS, 50_000])
def test_memory_is_flat(tmp_path: Path, row_group: int) -> None:
    numbers = pa.array(range(ROWS))
    texts = pa.array(f"{number} 오래 쓸 수 있는 좋은 물건입니다. " * 3 for number in range(ROWS))
    table = pa.table({"id": numbers, "review": texts})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=row_group)
    request = 'prompt = "리뷰: {review}\\n평가:"\nclean = {review = ["strip"]}'
    task = write_task(tmp_path, request, more="[parameters]\nmax_tokens = 8")
    done = subprocess.run(
        [sys.executable, "-c", RENDER, str(task)], check=True, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    print(found)  # noqa: T201 - the rate is for whoever measures
    assert found["rows"] == ROWS
    assert found["peak"] < MOST_BYTES
    assert found["peak"] - found["early"] < 64 << 20
