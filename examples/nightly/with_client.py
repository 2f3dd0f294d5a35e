"""The descriptions of `describe.toml`, by the Python client and a running deployment.

    python examples/nightly/with_client.py [--folder examples/nightly/data] [--night 2026-11-24]

For pipelines that have their rows in Python. A task file needs none of this code.
"""

import argparse
import datetime
import sqlite3
from contextlib import closing
from pathlib import Path

from nightjar import Client

FOLDER = Path(__file__).parent
PROMPT = "사용자: {name} 먹고 싶어\n클로바:"
FIELDS = {"max_tokens": 48, "temperature": 0, "repetition_penalty": 1.2, "stop": "\n사용자:"}
TABLE = "CREATE TABLE IF NOT EXISTS described (sku TEXT PRIMARY KEY, text TEXT, error TEXT)"


def describe(folder: Path, night: str) -> int:
    """Describe every product in the table `described`; return how many have no description.

    The same night makes one job, however often this is called: a retry waits for the job that
    the first try has made.
    """
    with closing(sqlite3.connect(folder / "shop.db")) as shop, Client() as client:
        shop.row_factory = sqlite3.Row
        products = [dict(row) for row in shop.execute("SELECT sku, name FROM products")]
        job = client.submit(
            products,
            template=PROMPT,
            id_column="sku",
            fields=FIELDS,
            idempotency_key=f"describe {night}",
        )
        status = job.wait()
        rows = [
            (one.custom_id, one.text, None if one.error is None else one.error.message)
            for one in job.results()
        ]
        with shop:  # one transaction: readers see the old rows or the new ones
            shop.execute(TABLE)
            shop.execute("DELETE FROM described")
            shop.executemany("INSERT INTO described VALUES (?, ?, ?)", rows)
    return status.counts.total - status.counts.completed


def main() -> None:
    """Describe the products of a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER / "data")
    parser.add_argument("--night", default=datetime.date.today().isoformat())
    asked = parser.parse_args()
    print(f"{describe(asked.folder, asked.night)} products have no description")


if __name__ == "__main__":
    main()
