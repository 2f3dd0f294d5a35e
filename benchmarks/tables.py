"""A task file from table to table with `nightjar run`, and the memory of every process.

    python -m benchmarks.tables [--rows 1000000] [--ways parquet,postgresql]
    python -m benchmarks.tables --ways nights --rows 12000 --answer-tokens 192

`parquet` and `postgresql` read that many rows from there and write the answers to there, with the
fake engine. `nights` computes the rows with the demo model on this machine's processor, changes one
row in a hundred, and computes again with the answers of the first night. Each answer has all of its
tokens there. Ways that are measured in several calls are kept together: `--out` adds to its file.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import sqlalchemy as sa

from benchmarks.control_plane.databases import fresh_database
from benchmarks.control_plane.watch import EVERY_S, growth, resident_bytes
from benchmarks.machine import describe
from benchmarks.writing import RESULTS, ROOT, begun, parser, words, write_json

MODULE = "benchmarks.tables"
WAYS = ("parquet", "postgresql", "nights")
ASKED = {"parquet_rows_per_s": 3_000, "postgresql_rows_per_s": 2_000, "peak_mib": 300, "nights": 20}
_ROWS_AT_ONCE = 50_000
_CHANGED_EACH = 100
_TASK = """
kind = "generate"
model = "{model}"
[source]
{source}
key = ["id"]
[request]
prompt = "사용자: {{review}}\\n클로바:"
[parameters]
max_tokens = {tokens}
temperature = 0
ignore_eos = {ignore_eos}
[sink]
{sink}
"""


def rows(count: int, night: int = 0) -> pa.RecordBatchReader:
    """Rows of a key and a text; one row in a hundred has another text each night."""
    schema = pa.schema([("id", pa.int64()), ("review", pa.string())])

    def batches() -> Iterator[pa.RecordBatch]:
        for begin in range(0, count, _ROWS_AT_ONCE):
            ids = range(begin, min(count, begin + _ROWS_AT_ONCE))
            texts = [f"오늘 저녁 {n}번 {night if n % _CHANGED_EACH == 0 else 0}" for n in ids]
            yield pa.record_batch([pa.array(ids, pa.int64()), pa.array(texts)], schema)

    return pa.RecordBatchReader.from_batches(schema, batches())


def write_parquet(path: Path, count: int, night: int = 0) -> None:
    """The rows as one file."""
    found = rows(count, night)
    with pq.ParquetWriter(path, found.schema) as writer:
        for batch in found:
            writer.write_batch(batch)


def write_table(url: str, count: int) -> None:
    """The rows as a table `reviews` of PostgreSQL."""
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE reviews (id bigint PRIMARY KEY, review text)"))
        raw = connection.connection.cursor()
        for batch in rows(count):
            with raw.copy("COPY reviews FROM STDIN") as copy:
                for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    copy.write_row(row)
    engine.dispose()


def run(
    folder: Path, source: str, sink: str, args: Namespace, more: Mapping[str, str]
) -> dict[str, Any]:
    """`nightjar run` of a task, watched: its seconds, its rate, the memory of its processes."""
    task = folder / "task.toml"
    text = _TASK.format(
        model=args.model.resolve(),
        source=source,
        sink=sink,
        tokens=args.answer_tokens,
        ignore_eos=str(args.reuse).lower(),
    )
    task.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "nightjar", "run", str(task)]
    command += ["--reuse-results", str(folder / "answers.db")] if args.reuse else []
    environment = os.environ | more
    began = time.monotonic()
    with (folder / "said.txt").open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(command, env=environment, stderr=stream)
        memory = _memory(psutil.Process(process.pid))
        status = process.wait()
    seconds = time.monotonic() - began
    said = (folder / "said.txt").read_text(encoding="utf-8")
    if status:
        raise SystemExit(said)
    return {
        "rows": args.rows,
        "seconds": round(seconds, 1),
        "rows_per_s": round(args.rows / seconds, 1),
        "memory": memory,
        "summary": said.strip().splitlines()[-1],
    }


_NAMES = {  # by a part of the command line
    "planning": "planner",
    "gpu_worker.worker": "gpu_worker",
    "gpu_worker.compute": "compute",
    "beat": "beat",
    "valkey": "broker",
    "redis": "broker",
}


def _memory(root: psutil.Process) -> dict[str, dict[str, float]]:
    """The memory of a run and its services until it ends, by what their command lines say."""
    series: dict[str, list[float]] = defaultdict(list)
    while root.is_running() and root.status() != psutil.STATUS_ZOMBIE:
        try:
            for process in [root, *root.children(recursive=True)]:
                line = " ".join(process.cmdline()[1:])
                name = next((name for part, name in _NAMES.items() if part in line), "run")
                if process == root or name != "run":
                    series[name].append(resident_bytes(process) / 2**20)
        except psutil.NoSuchProcess:  # it has just ended
            continue
        time.sleep(EVERY_S)
    return {name: growth(values) for name, values in sorted(series.items())}


def measure(way: str, args: Namespace, folder: Path) -> dict[str, Any]:
    """The figures of one way."""
    fake = {"NIGHTJAR_ENGINE": "fake"}
    if way == "parquet":
        write_parquet(folder / "in.parquet", args.rows)
        figures: dict[str, Any] = run(
            folder, 'parquet = "in.parquet"', 'parquet = "out.parquet"', args, fake
        )
        answered = pq.read_metadata(folder / "out.parquet").num_rows
    elif way == "postgresql":
        with fresh_database("postgresql", folder) as (url, _):
            write_table(url, args.rows)
            source = 'sql = { url = "env:SHOP", query = "SELECT id, review FROM reviews" }'
            sink = 'sql = { url = "env:SHOP", table = "answers" }'
            figures = run(folder, source, sink, args, fake | {"SHOP": url})
            engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
            with engine.connect() as connection:
                answered = connection.scalar(sa.text("SELECT count(*) FROM answers"))
            engine.dispose()
    else:
        figures = {}
        for night in range(2):
            write_parquet(folder / "in.parquet", args.rows, night)
            one = run(folder, 'parquet = "in.parquet"', 'parquet = "out.parquet"', args, {})
            figures["second" if night else "first"] = one
        figures["ratio"] = round(figures["first"]["seconds"] / figures["second"]["seconds"], 1)
        answered = pq.read_metadata(folder / "out.parquet").num_rows
    if answered != args.rows:
        raise SystemExit(f"{way}: {answered} of {args.rows} rows are in the sink")
    return figures


def main() -> None:
    options = parser(MODULE, __doc__)
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--ways", type=words(WAYS), default=["parquet", "postgresql"])
    options.add_argument("--answer-tokens", type=int, default=16, help="at most, of each row")
    options.add_argument("--model", type=Path, default=ROOT / "examples" / "demo_model")
    options.add_argument("--work", type=Path, default=Path("build/tables"), help="emptied before")
    args = options.parse_args()
    figures = begun(MODULE) | {"machine": describe(2, with_torch=False), "asked": ASKED}
    out = args.out or RESULTS / f"tables-{figures['date']}.json"
    if out.is_file():
        figures = json.loads(out.read_text(encoding="utf-8"))
    for way in args.ways:
        args.reuse = way == "nights"
        folder = args.work / way
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        figures[way] = measure(way, args, folder) | {"command": begun(MODULE)["command"]}
        print(way, figures[way], flush=True)
        write_json(out, figures)


if __name__ == "__main__":
    main()
