"""Readers that look again and again while results are replaced: the old or the new, never a mix."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nightjar.pipeline.tables.sinks.sink import Sink
from tests.tables import many, rows_of, sink
from tests.tables_database import Db

NIGHTS = 8
ROWS = 1_500  # more than one file of a folder


def write_nights(opened: Callable[[str], Sink]) -> None:
    for night in range(NIGHTS):
        opened(f"night-{night}").write(many(ROWS, text=f"night {night}:"))


def watched(read: Callable[[], list[str | None]], work: Callable[[], None]) -> set[str]:
    """What a reader sees while the work is done; each look must be of one night, and whole."""
    done, mixed = threading.Event(), list[tuple[int, set[str]]]()
    seen: set[str] = set()

    def look() -> None:
        while not done.is_set():
            texts = read()
            nights = {text.partition(":")[0] for text in texts if text is not None}
            if len(texts) != ROWS or len(nights) != 1:
                mixed.append((len(texts), nights))
            seen.update(nights)

    reader = threading.Thread(target=look)
    reader.start()
    try:
        work()
    finally:
        done.set()
        reader.join()
    assert mixed == []
    return seen


@pytest.mark.parametrize("target", ["out.jsonl", "out.parquet", "out/"])
def test_readers_of_files(tmp_path: Path, target: str) -> None:
    config = {"jsonl" if "jsonl" in target else "parquet": f"{tmp_path}/{target}"}
    options = {"rows_per_file": 1_000} if target == "out/" else {}

    def opened(run: str) -> Sink:
        return sink(run=run, **config, **options)

    opened("first").write(many(ROWS, text="first:"))

    def read() -> list[str | None]:
        while True:
            try:
                return [one["text"] for one in rows_of(tmp_path / target)]
            except FileNotFoundError:  # the folder that was listed is gone: look again
                assert target == "out/"

    assert len(watched(read, lambda: write_nights(opened))) > 1


def test_readers_of_a_table(database_url: str) -> None:
    db = Db(database_url)
    db.sink(run="first").write(many(ROWS, text="first:"))

    def read() -> list[str | None]:
        return [text for (text,) in db.rows("SELECT text FROM answers")]

    assert len(watched(read, lambda: write_nights(lambda run: db.sink(run=run)))) > 1
    db.engine.dispose()
