"""A task file from table to table with `nightjar run`, and the memory of every process.

`parquet` and `postgresql` read that many rows from there and write the answers to there, with the
fake engine. `nights` computes the rows with the demo model on this machine's processor, changes one
row in a hundred, and computes again with the answers of the first night. Each answer has all of its
tokens there.
"""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import sqlalchemy as sa

from benchmarks.control_plane.services import fresh_database
from benchmarks.control_plane.watch import nightjar_run
from benchmarks.harness import Benchmark, Figures
from nightjar.jobs.store.database import database_url as with_driver

_CHANGED_EACH = 100
_ROW_GROUP = 50_000
_TASK = Path(__file__).with_name("table_task.template")


def rows(count: int, night: int = 0) -> pd.DataFrame:
    """Rows of a key and a text; one row in a hundred has another text each night."""
    texts = [f"오늘 저녁 {n}번 {night if n % _CHANGED_EACH == 0 else 0}" for n in range(count)]
    return pd.DataFrame({"id": range(count), "review": texts})


def run(
    args: Namespace, folder: Path, source: str, sink: str, *options: str | Path, **more: str
) -> Figures:
    """`nightjar run` of a task: its seconds, its rate, the memory of its processes.

    more: variables of its environment.
    """
    task, is_fake = folder / "task.toml", args.way != "nights"
    environment = more | ({"NIGHTJAR_ENGINE": "fake"} if is_fake else {})
    text = _TASK.read_text(encoding="utf-8").format(
        model=args.model.resolve(),
        source=source,
        sink=sink,
        tokens=args.answer_tokens,
        ignore_eos=str(not is_fake).lower(),
    )
    task.write_text(text, encoding="utf-8")
    # The services end while the answers are written: then nobody shares the libraries any more.
    seconds, watch, said = nightjar_run(task, *options, environment=environment, shared=False)
    return {
        "rows": args.rows,
        "seconds": round(seconds, 1),
        "rows_per_s": round(args.rows / seconds, 1),
        "memory": watch.memory(),
        "summary": said.splitlines()[-1],
    }


def over_parquet(args: Namespace, folder: Path, *options: str | Path, night: int = 0) -> Figures:
    """From a file to a file."""
    source = folder / "in.parquet"
    rows(args.rows, night).to_parquet(source, index=False, row_group_size=_ROW_GROUP)
    return run(args, folder, 'parquet = "in.parquet"', 'parquet = "out.parquet"', *options)


def over_postgresql(args: Namespace, folder: Path) -> Figures:
    """From a table to a table of the same database."""
    source = 'sql = { url = "env:SHOP", query = "SELECT id, review FROM reviews" }'
    sink = 'sql = { url = "env:SHOP", table = "answers" }'
    with fresh_database("postgresql", folder) as database:
        engine = sa.create_engine(with_driver(database.url))
        rows(args.rows).to_sql("reviews", engine, index=False, method="multi", chunksize=10_000)
        engine.dispose()
        return run(args, folder, source, sink, SHOP=database.url)


def two_nights(args: Namespace, folder: Path) -> Figures:
    """The whole, then what has changed."""
    reuse = "--reuse-results", folder / "answers.db"
    first, second = (over_parquet(args, folder, *reuse, night=night) for night in range(2))
    ratio = round(first["seconds"] / second["seconds"], 1)
    return {"first": first, "second": second, "ratio": ratio}


WAYS: dict[str, Callable[[Namespace, Path], Figures]] = {
    "parquet": over_parquet,
    "postgresql": over_postgresql,
    "nights": two_nights,
}
OPTIONS = {
    "--rows": (1_000_000, "of the table"),
    "--answer-tokens": (16, "most of each row"),
    "--ways": (["parquet", "postgresql"], "in order", WAYS),
}
BENCHMARK = Benchmark(
    "tables", __doc__, lambda args, folder: WAYS[args.way](args, folder), tuple(WAYS), OPTIONS
)

if __name__ == "__main__":
    BENCHMARK.main()
