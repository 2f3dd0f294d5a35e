"""Task files and their tables, for tests."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.records import NewRequest, RejectedRow
from nightjar.pipeline.tasks.fitting import ContextFitter
from nightjar.pipeline.tasks.opening import open_source
from nightjar.pipeline.tasks.rendering import Renderer
from nightjar.pipeline.tasks.task_file import read_task

PROMPT = 'prompt = "{review}"'


def write_task(
    folder: Path,
    request: str = PROMPT,
    *,
    kind: str = "generate",
    source: str = 'parquet = "rows.parquet"',
    key: str = '["id"]',
    more: str = "",
) -> Path:
    """Write a task file; `more` follows the [request] table."""
    path = folder / "task.toml"
    path.write_text(
        f'kind = "{kind}"\n[source]\n{source}\nkey = {key}\n[request]\n{request}\n{more}\n',
        encoding="utf-8",
    )
    return path


def write_rows(folder: Path, columns: Mapping[str, Any], name: str = "rows.parquet") -> Path:
    """Write a Parquet file."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), folder / name)
    return folder / name


def rendered(
    task: Path, model: ModelDirectory | None = None, environment: Mapping[str, str] = os.environ
) -> list[NewRequest | RejectedRow]:
    """Render every row of a task."""
    file = read_task(task)
    source = open_source(file, environment)
    fitter = None if model is None else ContextFitter(file.task, model)
    return list(Renderer(file.task, source.schema, fitter).rows(source))


def prompts(rows: list[NewRequest | RejectedRow]) -> list[str]:
    """Return the prompt of each request, and the message of each rejected row."""
    return [row.body["prompt"] if isinstance(row, NewRequest) else row.message for row in rows]
