"""Prints what each user is shown: python examples/nightly/show.py [--users 10]."""

import argparse
import sqlite3
from contextlib import closing
from pathlib import Path

FOLDER = Path(__file__).parent
QUERY = (FOLDER / "show.sql").read_text(encoding="utf-8")


def main() -> None:
    """Print the first users."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=FOLDER / "data")
    asked = parser.parse_args()
    with closing(sqlite3.connect(asked.folder / "shop.db")) as shop:
        for user, name, cuisine, line in shop.execute(QUERY).fetchmany(asked.users):
            print(f"{user}  {name} ({cuisine}) {line.strip()}")


if __name__ == "__main__":
    main()
