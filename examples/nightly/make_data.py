"""Makes the data of a small shop: products in SQLite, users and their candidates in Parquet.

    python examples/nightly/make_data.py [--night 2] [--folder examples/nightly/data]

Night 2 is the same shop a day later: one product is gone, one has a new name, one user is new.
"""

import argparse
import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA = Path(__file__).parent / "data"
USERS = 200
CANDIDATES = 8
CHANGING = ("P000", "P031")  # products of which night 2 renames one and drops the other
PRODUCTS: dict[str, Sequence[str]] = {
    "한식": ("된장찌개", "김치찌개", "비빔밥", "불고기", "갈비탕", "삼계탕", "잡채", "칼국수"),
    "중식": ("짜장면", "짬뽕", "탕수육", "마파두부", "깐풍기", "양장피", "마라탕", "울면"),
    "일식": ("초밥", "라멘", "우동", "돈가스", "규동", "텐동", "사시미", "스키야키"),
    "양식": ("스파게티", "스테이크", "피자", "리소토", "라자냐", "햄버거", "오믈렛", "뇨키"),
}

Product = tuple[str, str, str, int]


def make_products(night: int) -> list[Product]:
    """(sku, name, cuisine, price) of each product."""
    products = [
        (f"P{number:03}", name, cuisine, 7_000 + 500 * (number % 9))
        for number, (cuisine, name) in enumerate(
            (cuisine, name) for cuisine, names in PRODUCTS.items() for name in names
        )
    ]
    if night == 1:
        return products
    renamed = ("P000", "청국장", "한식", 9_000)
    return [renamed, *products[1:-1]]


def make_users(products: Sequence[Product], night: int) -> list[dict[str, Any]]:
    """Users with the products among which one is recommended to each."""
    users = []
    lasting = [one for one in products if one[0] not in CHANGING]
    for number in range(USERS + night - 1):
        draw = random.Random(number)
        chosen = draw.sample(lasting, CANDIDATES)
        users.append(
            {
                "user": f"user-{number:04}",
                "cuisine": draw.choice(list(PRODUCTS)),
                "candidates": [{"sku": sku, "said": said(name)} for sku, name, _, _ in chosen],
            }
        )
    return users


def said(name: str) -> str:
    """The name as the end of a sentence: the ending depends on the last consonant."""
    return name + ("이야" if (ord(name[-1]) - ord("가")) % 28 else "야")


def write_shop(path: Path, products: Sequence[Product], users: Sequence[dict[str, Any]]) -> None:
    """Replace the shop's own tables; those with results stay."""
    candidates = [
        (user["user"], place, candidate["sku"])
        for user in users
        for place, candidate in enumerate(user["candidates"])
    ]
    with closing(sqlite3.connect(path)) as shop, shop:
        shop.executescript(
            "DROP TABLE IF EXISTS products; DROP TABLE IF EXISTS candidates;"
            "CREATE TABLE products (sku TEXT PRIMARY KEY, name TEXT, cuisine TEXT, price INTEGER);"
            'CREATE TABLE candidates ("user" TEXT, place INTEGER, sku TEXT,'
            ' PRIMARY KEY ("user", place));'
        )
        shop.executemany("INSERT INTO products VALUES (?, ?, ?, ?)", products)
        shop.executemany("INSERT INTO candidates VALUES (?, ?, ?)", candidates)


def main() -> None:
    """Write shop.db and users.parquet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--night", type=int, choices=(1, 2), default=1)
    parser.add_argument("--folder", type=Path, default=DATA)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    products = make_products(asked.night)
    users = make_users(products, asked.night)
    write_shop(asked.folder / "shop.db", products, users)
    pq.write_table(pa.Table.from_pylist(users), asked.folder / "users.parquet")
    print(f"{len(products)} products and {len(users)} users: {asked.folder}")


if __name__ == "__main__":
    main()
