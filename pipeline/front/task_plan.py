"""What a task will cost: reads its rows and counts their tokens, and computes nothing."""

import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.records import (
    EncodedRequest,
    NewRequest,
    QueuedRequest,
    RejectedRow,
)
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.vector_records import PromptVector
from nightjar.pipeline.embedded.workdir import Speed, sqlite_url
from nightjar.pipeline.files.vectors import register_vectors
from nightjar.pipeline.planning.encode import Encoder
from nightjar.pipeline.planning.placeholders import VectorLookup
from nightjar.pipeline.queue.queues import bucket_for
from nightjar.pipeline.tables.repeats import Repeat, Repeats

_AT_A_TIME = 256
_MOST_TOLD = 5
_BAR = 40


@dataclass(slots=True)
class TaskPlan:
    """What was counted.

    bad: Rows that cannot become requests, or that do not fit the model.
    told: The messages of the first of them.
    buckets: Requests by the length of their longest sequence, rounded up as micro-batches are.
    prompt_tokens: Of all requests. Of a ranking, the query and every document.
    most_answer_tokens: If no answer ends before its max_tokens.
    """

    rows: int = 0
    bad: int = 0
    told: list[str] = field(default_factory=list)
    buckets: Counter[int] = field(default_factory=Counter)
    prompt_tokens: int = 0
    most_answer_tokens: int = 0
    longest: int = 0
    repeat: Repeat | None = None

    @property
    def requests(self) -> int:
        """Rows that will be computed."""
        return self.rows - self.bad


def plan_rows(rows: Iterable[NewRequest | RejectedRow], encoder: Encoder) -> TaskPlan:
    """Count the rows, a few hundred in memory at a time."""
    plan = TaskPlan()
    with Repeats() as repeats:
        remaining = iter(rows)
        while chunk := list(islice(remaining, _AT_A_TIME)):
            plan.rows += len(chunk)
            repeats.add(row.custom_id for row in chunk if row.custom_id is not None)
            _note_bad(plan, (row.message for row in chunk if isinstance(row, RejectedRow)))
            _count(plan, [row for row in chunk if isinstance(row, NewRequest)], encoder)
        plan.repeat = repeats.first()
    return plan


def _count(plan: TaskPlan, requests: list[NewRequest], encoder: Encoder) -> None:
    by_index = {row.index: row for row in requests}
    encoded, refused = encoder.encode(
        [
            QueuedRequest(row.index, "", row.index, row.custom_id, row.kind, row.body)
            for row in requests
        ]
    )
    _note_bad(plan, (f"line {index + 1}: {error.message}" for index, error in refused))
    for request in encoded:
        _add(plan, by_index[request.id], request)


def _add(plan: TaskPlan, row: NewRequest, encoded: EncodedRequest) -> None:
    first, *documents = map(len, encoded.segments)
    length = first + max(documents, default=0)
    plan.buckets[bucket_for(length)] += 1
    plan.longest = max(plan.longest, length)
    plan.prompt_tokens += first + sum(documents)
    if row.kind is RequestKind.GENERATE:
        plan.most_answer_tokens += int(row.body["max_tokens"]) * int(row.body["n"])


def _note_bad(plan: TaskPlan, messages: Iterable[str]) -> None:
    for message in messages:
        plan.bad += 1
        if len(plan.told) < _MOST_TOLD:
            plan.told.append(message)


@contextmanager
def planning_encoder(model: ModelDirectory, vectors: Mapping[str, Path]) -> Iterator[Encoder]:
    """Give the encoder that the planner uses, which knows these files of prompt vectors.

    Raises:
        VectorsError: A file cannot be used.
    """
    with tempfile.TemporaryDirectory() as folder:
        find: VectorLookup = _none
        store = None
        if vectors:
            store = Store(sqlite_url(Path(folder) / "vectors.db"))
            store.migrate()
            for name, path in vectors.items():
                register_vectors(store.vectors, name, path, model)
            find = store.vectors.resolve
        try:
            yield Encoder(model.config, model.tokenizer(), find, model.chat_template())
        finally:
            if store is not None:
                store.close()


def _none(_: Collection[str], __: str) -> Mapping[str, PromptVector]:
    return {}


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the rows will take, if they are computed as fast as those of the last run.

    price_per_hour: Of the machine, in any currency; None leaves the cost out.
    """

    seconds: float
    speed: Speed
    price_per_hour: float | None

    @property
    def cost(self) -> float | None:
        """In the currency of the price."""
        price = self.price_per_hour
        return None if price is None else price * self.seconds / 3_600


def forecast(plan: TaskPlan, speed: Speed | None, price_per_hour: float | None) -> Forecast | None:
    """Return what the rows will take; None before a first run."""
    if speed is None:
        return None
    seconds = plan.requests * speed.seconds / max(speed.requests, 1)
    return Forecast(seconds, speed, price_per_hour)


def plan_json(plan: TaskPlan, expected: Forecast | None) -> dict[str, Any]:
    """Return what `nightjar plan --json` prints."""
    found: dict[str, Any] = {
        "rows": plan.rows,
        "requests": plan.requests,
        "bad": plan.bad,
        "first_bad": plan.told,
        "prompt_tokens": plan.prompt_tokens,
        "most_answer_tokens": plan.most_answer_tokens,
        "longest": plan.longest,
        "buckets": [{"to": to, "requests": count} for to, count in sorted(plan.buckets.items())],
        "first_repeat": None if plan.repeat is None else plan.repeat.second + 1,
        "expected": None,
    }
    if expected is not None:
        speed = expected.speed
        found["expected"] = {
            "seconds": round(expected.seconds, 3),
            "cost": None if expected.cost is None else round(expected.cost, 4),
            "requests_per_second": round(speed.requests / speed.seconds, 3),
            "reused_share": round(speed.reused / max(speed.requests, 1), 4),
        }
    return found


def plan_lines(plan: TaskPlan, expected: Forecast | None) -> Iterator[str]:
    """Yield the lines that `nightjar plan` prints."""
    yield f"{plan.rows} rows: {plan.requests} requests, {plan.bad} that cannot be used"
    yield (
        f"{plan.prompt_tokens} prompt tokens, at most {plan.most_answer_tokens} answer tokens; the "
        f"longest request has {plan.longest} tokens before its answer"
    )
    most = max(plan.buckets.values(), default=1)
    for bucket, count in sorted(plan.buckets.items()):
        bar = "#" * max(1, round(_BAR * count / most))
        yield f"  to {bucket:>7} tokens {count:>9} {bar}"
    yield from _expected(expected)
    if plan.repeat is not None:
        yield (
            "keys repeat: the second row with a key fails; the first such row is number "
            f"{plan.repeat.second + 1} of the rows with a key"
        )
    if plan.told:
        yield "the first rows that cannot be used:"
        yield from (f"  {message}" for message in plan.told)


def _expected(expected: Forecast | None) -> Iterator[str]:
    if expected is None:
        yield "expected time: not known before a first run"
        return
    speed = expected.speed
    reused = f", which reused {speed.reused} of its answers" if speed.reused else ""
    yield (
        f"expected time: {_duration(expected.seconds)}, at the "
        f"{speed.requests / speed.seconds:.1f} requests/s of the last run{reused}; loading the "
        "model is not in it"
    )
    if expected.cost is not None:
        yield f"expected cost: {expected.cost:.2f}, at {expected.price_per_hour:g} an hour"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
