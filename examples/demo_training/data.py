"""Which rows there are, how they read as text, and which are kept out of training."""

import csv
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Row = TypeVar("Row")

STOP = "\n사용자:"
REVIEW_HEAD = "리뷰: "
VERDICTS = (" 재미있다", " 재미없다")
CHAT_HELDOUT = 600
REVIEW_HELDOUT = 3000
CHAT_VALID = 300
REVIEW_VALID = 2000


@dataclass(frozen=True)
class Turn:
    """One question with its answer."""

    question: str
    answer: str

    @property
    def prompt(self) -> str:
        """The text up to where the answer starts."""
        return f"사용자: {self.question}\n클로바:"


@dataclass(frozen=True)
class Review:
    """A film review; verdict 0 is good, 1 is bad (an index into VERDICTS)."""

    text: str
    verdict: int

    @property
    def prompt(self) -> str:
        """The text up to where the verdict starts."""
        return f"{REVIEW_HEAD}{self.text}\n평가:"


@dataclass(frozen=True)
class Data:
    """Rows for training, for watching it (valid) and for the figures at its end (heldout)."""

    chat: list[Turn]
    chat_valid: list[Turn]
    chat_heldout: list[Turn]
    reviews: list[Review]
    reviews_valid: list[Review]
    reviews_heldout: list[Review]


def read_table(path: Path, delimiter: str, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a table with a header, with the given columns stripped of blanks."""
    if not path.is_file():
        raise SystemExit(f"error: no such file: {path} (see --data)")
    plain = delimiter == "\t"
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(
            file,
            delimiter=delimiter,
            quoting=csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL,
        )
        missing = [name for name in columns if name not in (reader.fieldnames or [])]
        if missing:
            raise SystemExit(f"error: {path} lacks the columns {', '.join(missing)}")
        return [{name: (row[name] or "").strip() for name in columns} for row in reader]


def split_key(text: str) -> str:
    """What decides the side of a row: equal for texts that differ in blanks or marks only."""
    letters = "".join(char for char in text.lower() if char.isalnum())
    return hashlib.sha256((letters or text).encode()).hexdigest()


def hold_out(
    rows: Sequence[Row], text_of: Callable[[Row], str], count: int
) -> tuple[list[Row], list[Row]]:
    """The rows of the smallest hashes, `count` or a few more as equal ones stay together; the rest.

    Both lists keep the order of `rows`.
    """
    keys = [split_key(text_of(row)) for row in rows]
    largest = sorted(keys)[count - 1]
    kept_out = [row for row, key in zip(rows, keys, strict=True) if key <= largest]
    return kept_out, [row for row, key in zip(rows, keys, strict=True) if key > largest]


def load_data(folder: Path) -> Data:
    """Reads both tables and splits them by the hash of the question or the review."""
    rows = read_table(folder / "chatbot" / "train.csv", ",", ("question", "answer"))
    turns = list(dict.fromkeys(Turn(row["question"], row["answer"]) for row in rows))
    turns = [turn for turn in turns if turn.question and turn.answer]
    rows = read_table(folder / "nsmc" / "train.tsv", "\t", ("rating", "review"))
    good = {row["review"]: int(row["rating"]) >= 9 for row in rows if row["review"]}
    reviews = [Review(text, 0 if liked else 1) for text, liked in good.items()]
    chat_heldout, turns = hold_out(turns, lambda turn: turn.question, CHAT_HELDOUT)
    chat_valid, turns = hold_out(turns, lambda turn: turn.question, CHAT_VALID)
    reviews_heldout, reviews = hold_out(reviews, lambda review: review.text, REVIEW_HELDOUT)
    reviews_valid, reviews = hold_out(reviews, lambda review: review.text, REVIEW_VALID)
    return Data(turns, chat_valid, chat_heldout, reviews, reviews_valid, reviews_heldout)
