"""Landed rows as people read them: a text, a ranking as bars, a JSON answer as a table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nightjar.jobs.records import JsonObject, ResultRecord

LONGEST_TEXT = 700  # characters; the downloads have the whole
LONGEST_CELL = 200
MOST_DOCUMENTS = 10
MOST_COLUMNS = 10
_LONGEST_JSON = 20_000


@dataclass(frozen=True, slots=True)
class Ranked:
    """One document of a ranking; `share` of the best score is the length of its bar, 0 to 1."""

    place: int
    index: int
    document: str | None
    score: float
    share: float


@dataclass(frozen=True, slots=True)
class Shown:
    """One row: what was asked, and one of text, ranking, table or error."""

    record: ResultRecord
    prompt: str | None
    text: str | None = None
    ranking: Sequence[Ranked] = ()
    documents: int = 0  # of the ranking; only the best are shown
    fields: Mapping[str, str] | None = None
    samples: int = 1


@dataclass(frozen=True, slots=True)
class Table:
    """Answers that all are JSON objects: one column for each field."""

    columns: Sequence[str]
    rows: Sequence[tuple[Shown, Sequence[str]]]
    more_columns: int


def shown(record: ResultRecord, asked: JsonObject | None) -> Shown:
    """A row as it is shown; `asked` is its request's body."""
    prompt = None if asked is None else _prompt(asked)
    body = record.body
    if body is None:
        return Shown(record, prompt)
    results = body.get("results")
    if isinstance(results, list):
        return Shown(
            record,
            prompt,
            ranking=_ranking(results, asked),
            documents=max(int(body.get("document_count", 0)), len(results)),
        )
    choices = body.get("choices")
    texts = [_text(one) for one in choices] if isinstance(choices, list) else []
    first = texts[0] if texts else ""
    return Shown(
        record,
        prompt,
        text=first[:LONGEST_TEXT] + ("…" if len(first) > LONGEST_TEXT else ""),
        fields=_fields(first),
        samples=max(1, len(texts)),
    )


def table(rows: Sequence[Shown]) -> Table | None:
    """The rows as one table, if there are several, and each success is a JSON object."""
    found = [row for row in rows if row.record.body is not None]
    if len(found) < 2 or any(row.fields is None for row in found):
        return None
    names = list(dict.fromkeys(name for row in found for name in row.fields or ()))
    columns = names[:MOST_COLUMNS]
    cells = [(row, [(row.fields or {}).get(name, "") for name in columns]) for row in rows]
    return Table(columns, cells, len(names) - len(columns))


def _prompt(asked: JsonObject) -> str:
    for name in ("prompt", "query"):
        if isinstance(asked.get(name), str):
            return _cut(asked[name], LONGEST_TEXT)
    messages = asked.get("messages")
    if isinstance(messages, list):
        lines = [
            f"{one.get('role', '')}: {_content(one.get('content'))}"
            for one in messages
            if isinstance(one, dict)
        ]
        return _cut("\n".join(lines), LONGEST_TEXT)
    return _cut(_compact(asked.get("prompt", "")), LONGEST_TEXT)


def _content(content: object) -> str:
    return content if isinstance(content, str) else _compact(content)


def _text(choice: object) -> str:
    if not isinstance(choice, dict):
        return ""
    message = choice.get("message")
    content = message.get("content") if isinstance(message, dict) else choice.get("text")
    return content if isinstance(content, str) else ""


def _ranking(results: Sequence[JsonObject], asked: JsonObject | None) -> list[Ranked]:
    documents = (asked or {}).get("documents") or []
    found = []
    best = max((float(one["relevance_score"]) for one in results), default=0.0)
    for place, one in enumerate(results[:MOST_DOCUMENTS], 1):
        index, score = int(one["index"]), float(one["relevance_score"])
        text = documents[index] if index < len(documents) else None
        if isinstance(text, dict):
            text = text.get("text")
        share = score / best if best > 0 else 0.0
        found.append(
            Ranked(
                place,
                index,
                _cut(text, LONGEST_CELL) if isinstance(text, str) else None,
                float(one["mean_nll"]),
                share,
            )
        )
    return found


def _fields(text: str) -> dict[str, str] | None:
    """The fields of an answer that is a JSON object; None for any other."""
    stripped = text.strip()
    if not stripped.startswith("{") or len(stripped) > _LONGEST_JSON:
        return None
    try:
        value = json.loads(stripped)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not value:
        return None
    return {
        _cut(name, LONGEST_CELL): _cut(one if isinstance(one, str) else _compact(one), LONGEST_CELL)
        for name, one in value.items()
    }


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _cut(value: str, most: int) -> str:
    return value if len(value) <= most else f"{value[:most]}…"
