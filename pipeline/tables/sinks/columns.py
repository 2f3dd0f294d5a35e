"""The columns of answers, by the kind of the task, and a row's values from its result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from nightjar.jobs.records import JsonObject, ResultRecord
from nightjar.pipeline.tables.keys import Keys

TaskKind = Literal["generate", "chat", "rank", "score"]

ERRORS = ("error_code", "error_message", "error_param")

_TEXT, _COUNT, _FLOAT = pa.string(), pa.int64(), pa.float64()


@dataclass(frozen=True, slots=True)
class Answers:
    """What decides about the columns of a task's answers.

    many: generate and chat: a row may have several answers (`n` above 1); the columns are lists.
    """

    kind: TaskKind
    many: bool = False


@dataclass(frozen=True, slots=True)
class AnswerColumns:
    """The columns of answers, and how a success fills them."""

    fields: dict[str, pa.DataType]
    values: Callable[[ResultRecord, JsonObject], tuple[Any, ...]]


def answer_columns(answers: Answers) -> AnswerColumns:
    """The columns of this kind of answers."""
    common = {"prompt_tokens": _COUNT, "model": _TEXT}
    if answers.kind == "rank":
        lists = {"scores": pa.list_(_FLOAT), "ranking": pa.list_(pa.int32())}
        return AnswerColumns(lists | common, _ranked)
    if answers.kind == "score":
        return AnswerColumns({"score": _FLOAT, "token_count": _COUNT} | common, _scored)
    text = pa.list_(_TEXT) if answers.many else _TEXT
    fields = {"text": text, "finish_reason": text}
    return AnswerColumns(
        {**fields, "prompt_tokens": _COUNT, "completion_tokens": _COUNT, "model": _TEXT},
        _generated_many if answers.many else _generated,
    )


def table_schema(keys: Keys, answers: Answers, *, with_errors: bool) -> pa.Schema:
    """Key columns, answers and, if asked for, errors.

    Raises:
        ValueError: A key column has the name of a column of answers or errors.
    """
    fields = [pa.field(name, type_) for name, type_ in answer_columns(answers).fields.items()]
    taken = {field.name for field in fields} | {*ERRORS}
    if both := sorted(taken & {*keys.names}):
        raise ValueError(
            f"the key column {both[0]} has the name of a column of results; rename it in the source"
        )
    errors = [pa.field(name, _TEXT) for name in ERRORS] if with_errors else []
    return pa.schema([*keys.schema, *fields, *errors])


def errors_schema(keys: Keys) -> pa.Schema:
    """Key columns and errors, for failed rows that are written apart."""
    return pa.schema([*keys.schema, *(pa.field(name, _TEXT) for name in ERRORS)])


def _text(choice: JsonObject) -> str | None:
    text: str | None = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def _generated(record: ResultRecord, body: JsonObject) -> tuple[Any, ...]:
    choice = body["choices"][0]
    counts = record.prompt_tokens, record.completion_tokens
    return (_text(choice), choice["finish_reason"], *counts, body["model"])


def _generated_many(record: ResultRecord, body: JsonObject) -> tuple[Any, ...]:
    choices = body["choices"]
    reasons = [choice["finish_reason"] for choice in choices]
    counts = record.prompt_tokens, record.completion_tokens
    return ([_text(choice) for choice in choices], reasons, *counts, body["model"])


def _ranked(record: ResultRecord, body: JsonObject) -> tuple[Any, ...]:
    """Scores in the order of the documents; of those that `top_n` has cut, null."""
    ranking = [result["index"] for result in body["results"]]
    scores: list[float | None] = [None] * body.get("document_count", max(ranking, default=-1) + 1)
    for result in body["results"]:
        scores[result["index"]] = result["relevance_score"]
    return scores, ranking, record.prompt_tokens, body["model"]


def _scored(record: ResultRecord, body: JsonObject) -> tuple[Any, ...]:
    """The row's text is the only document of a ranking."""
    result = body["results"][0]
    return result["mean_nll"], result["token_count"], record.prompt_tokens, body["model"]
