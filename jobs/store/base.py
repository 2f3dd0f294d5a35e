"""What every part of the store shares: the database, and how an outcome lands."""

import json
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from nightjar.jobs import lifecycle
from nightjar.jobs.errors import StoreError
from nightjar.jobs.records import (
    JobState,
    JsonObject,
    MicroBatchRef,
    NewResult,
    RequestState,
    StopReason,
)
from nightjar.jobs.store.bulk import BulkInsert, driver_value
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.following import (
    COUNTED_STATES,
    FOLLOWERS_PER_STEP,
    IS_FOLLOWING,
    Followers,
)
from nightjar.jobs.store.landings import CountAndNote, new_token
from nightjar.jobs.store.tables import UNPLANNED, job, micro_batch, request, result

AnyRow = Row[*tuple[Any, ...]]
Answer = TypeVar("Answer")

_STOPPED = {
    StopReason.CANCELLED: (499, "the job was cancelled before this row was computed"),
    StopReason.EXPIRED: (504, "the job's completion window ended before this row was computed"),
}
_STOPPED_CODES = frozenset(reason.value for reason in StopReason)
FAULT_STATUS = 500  # ours, not the request's

# With the partial index's own condition, so that the planner of SQL sees that it fits.
AWAITS_PLAN = sa.and_(request.c.state == RequestState.QUEUED, UNPLANNED)
REF_COLUMNS = [micro_batch.c[name] for name in MicroBatchRef.__slots__ if name != "urgent"]
OPEN_JOBS = lifecycle.states_before(lifecycle.JOB_TRANSITIONS, JobState.CANCELLING)
TOKEN_COUNTS = ("prompt_tokens", "completion_tokens", "requested_tokens", "saved_tokens")
REUSE_COUNTS = ("reused", "reused_tokens")

# Built once: this runs with every micro-batch.
_COUNT = (
    sa.update(job)
    .where(job.c.id == sa.bindparam("counted_job"))
    .values(
        {
            name: job.c[name] + sa.bindparam(f"more_{name}", type_=sa.BigInteger)
            for name in (*COUNTED_STATES.values(), *TOKEN_COUNTS, *REUSE_COUNTS, "landed")
        }
    )
    .returning(
        job.c.total,
        job.c.completed,
        job.c.failed,
        job.c.cancelled,
        job.c.cancel_requested,
        job.c.expired,
        job.c.landed,
    )
)
LEADERS_PER_STEP = 100
_FOLLOWED = (
    sa.select(request.c.leader_id)
    .where(request.c.job_id == sa.bindparam("job"), IS_FOLLOWING)
    .distinct()
    .limit(LEADERS_PER_STEP)
)
_RESULT_COLUMNS = [column.name for column in result.c]


def now() -> datetime:
    """The wall clock, for people: no decision of the store rests on it."""
    return datetime.now(UTC)


def dump_json(value: JsonObject | Mapping[str, str]) -> str:
    """Compact JSON text; StoreError for what JSON cannot say, such as NaN."""
    if not _is_finite(value.values()):  # msgspec would write null
        raise StoreError("a body cannot be written as JSON: it holds a number that is not finite")
    try:
        return _encode_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"a body cannot be written as JSON: {error}") from error


def _encode_json(value: JsonObject | Mapping[str, str]) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except OverflowError:  # it knows integers of 64 bits only
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _is_finite(values: Iterable[object]) -> bool:
    """Whether no number in these values of JSON is NaN or infinite."""
    for value in values:
        # By type, not by isinstance: this loop runs over every value of every body.
        kind = type(value)
        if kind is float:
            if not math.isfinite(value):  # type: ignore[arg-type]
                return False
        elif kind is dict or kind is list or kind is tuple:
            inner = value.values() if kind is dict else value  # type: ignore[attr-defined]
            if inner and not _is_finite(inner):  # type: ignore[arg-type]
                return False
    return True


def has_rows(order: sa.Column[int], *where: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    """Whether any row meets the conditions, to be looked up by the index that has `order` in it.

    Not EXISTS: PostgreSQL makes a join of it, and where it thinks that many rows meet them it reads
    the table from the start until one does. In a big job those that are over come first.
    """
    first = sa.select(sa.literal_column("1", sa.Integer)).where(*where).order_by(order).limit(1)
    return first.scalar_subquery().is_not(None)


def load_json(text: str) -> JsonObject:
    """The object behind `dump_json`."""
    value: JsonObject = msgspec.json.decode(text)
    return value


def stop_reason(row: AnyRow) -> StopReason | None:
    """Why the job of a row (cancel_requested, expired) is to stop, if it is."""
    if not row.cancel_requested:
        return None
    return StopReason.EXPIRED if row.expired else StopReason.CANCELLED


def stopped_result(request_id: int, reason: StopReason) -> NewResult:
    """The outcome of a request whose job was stopped before it was computed."""
    status, message = _STOPPED[reason]
    return NewResult.failure(request_id, reason.value, message, status=status)


def set_running(connection: Connection, job_id: str) -> None:
    """A job that was queued has begun."""
    lifecycle.check_step(lifecycle.JOB_TRANSITIONS, JobState.QUEUED, JobState.RUNNING)
    connection.execute(
        sa.update(job)
        .where(job.c.id == job_id, job.c.state == JobState.QUEUED)
        .values(state=JobState.RUNNING, started_at=now())
    )


class Turns:
    """Lets other processes write between the steps of long work.

    SQLite's other writers look every 0.1 s at most whether it is their turn; steps that follow each
    other at once would keep them out. PostgreSQL needs no turns.
    """

    _WRITE_S = 0.2
    _PAUSE_S = 0.12

    def __init__(self, database: Database) -> None:
        self._is_sqlite = database.is_sqlite
        self._since = time.monotonic()

    def give(self) -> None:
        """Between two steps: pause if this process has written for long enough."""
        if self._is_sqlite and time.monotonic() - self._since >= self._WRITE_S:
            time.sleep(self._PAUSE_S)
            self._since = time.monotonic()


class StorePart:
    """Base of the store's parts; each part holds the statements of one subject."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._insert_results = BulkInsert(database, result, _RESULT_COLUMNS)
        self._followers = Followers(database)
        self._count_and_note = CountAndNote(database, _COUNT)
        self._end_requests = {state: _end_requests(database, state) for state in COUNTED_STATES}
        self._unlanded = _Unlanded()

    def _write_landing(
        self, work: Callable[[Connection], Answer], *, durable: bool = True
    ) -> Answer:
        """Run `work` in a transaction, then land the followers that did not fit into it.

        Where this process dies in between, the sweeper lands them (`OrphanStore.land_orphans`).
        """
        self._unlanded.leaders.clear()
        answer = self._database.write(work, durable=durable)
        for job_id, leaders in self._unlanded.take():
            step = partial(self._land_followers, job_id=job_id, leaders=leaders)
            turns = Turns(self._database)
            while self._database.write(step) == FOLLOWERS_PER_STEP:
                turns.give()
        return answer

    def _land(
        self,
        connection: Connection,
        job_id: str,
        results: Sequence[NewResult],
        indexes: Mapping[int, int],
    ) -> None:
        """Give requests and their followers the outcomes, once, and count them in the job.

        The caller holds the rows' micro-batch, or has locked the rows themselves;
        `indexes` maps each request's id to its row's index.
        """
        if not results:
            return
        moment = driver_value(self._database, result.c.created_at, now())
        token = new_token()
        rows = [
            _result_row(item, job_id, indexes[item.request_id], moment, token) for item in results
        ]
        inserted = self._insert_results.run(connection, rows)
        if inserted != len(rows):
            # State and outcome change together, so a request without end has no outcome.
            raise StoreError(f"job {job_id}: {len(rows) - inserted} requests had an outcome before")
        ended: dict[RequestState, list[int]] = {}
        for item in results:
            ended.setdefault(outcome_state(item), []).append(item.request_id)
        for state, ids in ended.items():
            listed = json.dumps(ids) if self._database.is_sqlite else ids
            connection.execute(self._end_requests[state], {"ids": listed})
        more = _counted(results, ended)
        given = [item.request_id for item in results]
        led = self._followers.land(connection, job_id, given, more, token)
        if len(led) == FOLLOWERS_PER_STEP:
            self._unlanded.leaders.append((job_id, given))
        self._count(connection, job_id, more, token, [*given, *led])

    def _land_followers(self, connection: Connection, job_id: str, leaders: Collection[int]) -> int:
        """Land the followers of those leaders that have ended; returns how many did.

        Where these are FOLLOWERS_PER_STEP, more may be left.
        """
        if not leaders:
            return 0
        ended = (
            sa.select(request.c.id)
            .where(request.c.id.in_(leaders), request.c.state.in_(COUNTED_STATES))
            .order_by(request.c.id)
            .with_for_update()  # whoever is ending one sees its followers, or we its end
        )
        more = _counted((), {})
        ids, token = list(connection.scalars(ended)), new_token()
        landed = self._followers.land(connection, job_id, ids, more, token)
        if landed:
            self._count(connection, job_id, more, token, landed)
        return len(landed)

    def _land_some(self, connection: Connection, job_id: str) -> int:
        """Land some followers of the job whose leaders have ended; returns how many."""
        leaders = list(connection.scalars(_FOLLOWED, {"job": job_id}))
        return self._land_followers(connection, job_id, leaders)

    def _count(
        self,
        connection: Connection,
        job_id: str,
        more: Mapping[str, int],
        token: int,
        ids: Sequence[int],
    ) -> None:
        """Add to the job's counters, and these requests to its order of landing.

        The request that ends last gives the job its final state.
        """
        added = {f"more_{name}": number for name, number in more.items()}
        counted = self._count_and_note.run(connection, job_id, added, token, ids)
        if counted.completed + counted.failed + counted.cancelled == counted.total:
            final = lifecycle.final_job_state(
                counted.completed, counted.failed, stop_reason(counted)
            )
            sources = lifecycle.states_before(lifecycle.JOB_TRANSITIONS, final)
            connection.execute(
                sa.update(job)
                .where(job.c.id == job_id, job.c.state.in_(sources))
                .values(state=final, finished_at=now())
            )


class _Unlanded(threading.local):
    """Leaders that a transaction of this thread has ended without all of their followers."""

    def __init__(self) -> None:
        self.leaders: list[tuple[str, Sequence[int]]] = []

    def take(self) -> list[tuple[str, Sequence[int]]]:
        """What there is; then there is nothing."""
        taken, self.leaders = self.leaders, []
        return taken


def _counted(
    landed: Sequence[NewResult], ended: Mapping[RequestState, list[int]]
) -> dict[str, int]:
    """What outcomes add to each of the job's counters."""
    more = {name: sum(getattr(item, name) for item in landed) for name in TOKEN_COUNTS}
    more |= {name: len(ended.get(state, ())) for state, name in COUNTED_STATES.items()}
    reused = [item.prompt_tokens + item.completion_tokens for item in landed if item.reused]
    return more | {"reused": len(reused), "reused_tokens": sum(reused)}


def outcome_state(item: NewResult) -> RequestState:
    """What a request becomes with this outcome."""
    if item.error is None:
        return RequestState.DONE
    is_stopped = item.error.code in _STOPPED_CODES
    return RequestState.CANCELLED if is_stopped else RequestState.FAILED


def _end_requests(database: Database, state: RequestState) -> sa.Update:
    """Give requests their last state; `ids` is an array, on SQLite one in JSON."""
    is_given: sa.ColumnElement[bool]
    if database.is_sqlite:
        listed = sa.func.json_each(sa.bindparam("ids", type_=sa.Text)).table_valued("value")
        is_given = request.c.id.in_(sa.select(listed.c.value))
    else:
        is_given = request.c.id == sa.any_(sa.bindparam("ids", type_=sa.ARRAY(sa.BigInteger)))
    sources = lifecycle.states_before(lifecycle.REQUEST_TRANSITIONS, state)
    return sa.update(request).where(is_given, request.c.state.in_(sources)).values(state=state)


def _result_row(
    item: NewResult, job_id: str, index: int, moment: object, token: int
) -> tuple[Any, ...]:
    """The values of a result in the order of its table's columns."""
    error = item.error
    return (
        item.request_id,
        job_id,
        index,
        item.status_code,
        None if item.body is None else dump_json(item.body),
        error and error.code,
        error and error.message.replace("\x00", ""),
        error and error.param,
        item.prompt_tokens,
        item.completion_tokens,
        item.requested_tokens,
        item.saved_tokens,
        item.finish_reason,
        moment,
        item.reused and item.reused.value,
        token,
    )
