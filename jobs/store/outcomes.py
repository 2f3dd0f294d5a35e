"""How outcomes land: results once, their followers with them, and the job's counters."""

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs import lifecycle
from nightjar.jobs.records import NewResult
from nightjar.jobs.states import RequestState
from nightjar.jobs.store.announcing import IS_AWAITED, announce_end
from nightjar.jobs.store.answer_packs import AnswerPacks, Stored
from nightjar.jobs.store.bulk import BulkInsert, driver_value
from nightjar.jobs.store.common import TOKEN_COUNTS, AnyRow, now, today
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.following import (
    COUNTED_STATES,
    FOLLOWERS_PER_STEP,
    IS_FOLLOWING,
    Followers,
)
from nightjar.jobs.store.json_text import dump_json
from nightjar.jobs.store.landings import CountAndNote, new_token
from nightjar.jobs.store.parts import InPartOf
from nightjar.jobs.store.stop_reasons import STOPPED_CODES, stop_reason
from nightjar.jobs.store.tables import job, request, result
from nightjar.jobs.store.turns import Turns

Answer = TypeVar("Answer")

_REUSE_COUNTS = ("reused", "reused_tokens")

_MORE = {
    name: sa.bindparam(f"more_{name}", type_=sa.BigInteger)
    for name in (*COUNTED_STATES.values(), *TOKEN_COUNTS, *_REUSE_COUNTS, "landed")
}
_TODAY = sa.bindparam("today", type_=sa.BigInteger)
# Tokens of the same day are added up; the first of another day begin anew.
_OF_TODAY = sa.case((job.c.tokens_day == _TODAY, job.c.day_tokens), else_=0)

# Built once: this runs with every micro-batch.
_COUNT = (
    sa.update(job)
    .where(job.c.id == sa.bindparam("counted_job"))
    .values(
        {
            **{name: job.c[name] + more for name, more in _MORE.items()},
            "tokens_day": _TODAY,
            "day_tokens": _OF_TODAY + _MORE["prompt_tokens"] + _MORE["completion_tokens"],
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
        job.c.takes_rows,
    )
)
_STANDING = (
    sa.select(
        job.c.total,
        job.c.completed,
        job.c.failed,
        job.c.cancelled,
        job.c.cancel_requested,
        job.c.expired,
        job.c.takes_rows,
    )
    .where(job.c.id == sa.bindparam("of_job"), job.c.finished_at.is_(None))
    .with_for_update()
)
_LEADERS_PER_STEP = 100
_FOLLOWED = (
    sa.select(request.c.leader_id)
    .where(
        request.c.job_id == sa.bindparam("job", type_=sa.Text),
        InPartOf(request.c.id, sa.bindparam("job", type_=sa.Text)),
        IS_FOLLOWING,
    )
    .distinct()
    .limit(_LEADERS_PER_STEP)
)
_RESULT_COLUMNS = [column.name for column in result.c]


class Outcomes:
    """Gives requests their outcomes, once, and counts them in their jobs.

    Every part that ends requests shares one of these.
    """

    def __init__(self, database: Database, *, packs_answers: bool = True) -> None:
        self._database = database
        self._packs = AnswerPacks(database, enabled=packs_answers)
        self._insert_results = BulkInsert(database, result, _RESULT_COLUMNS)
        self._followers = Followers(database)
        self._count_and_note = CountAndNote(database, _COUNT)
        self._end_requests = {state: _end_requests(database, state) for state in COUNTED_STATES}
        self._unlanded = _Unlanded()

    def write(
        self, work: Callable[[Connection], Answer], *, durable: bool = True, live: bool = False
    ) -> Answer:
        """Run `work` in a transaction, then land the followers that did not fit into it.

        `durable` and `live` as in `Database.write`.

        If this process dies in between, the sweeper lands them (`Orphans.land`).
        """
        self._unlanded.leaders.clear()
        answer = self._database.write(work, durable=durable, live=live)
        for job_id, leaders in self._unlanded.take():
            step = partial(self.land_followers, job_id=job_id, leaders=leaders)
            turns = Turns(self._database)
            while self._database.write(step) == FOLLOWERS_PER_STEP:
                turns.give()
        return answer

    def land(
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
        bodies = {
            item.request_id: dump_json(item.body) for item in results if item.body is not None
        }
        packed = self._packs.store(connection, bodies)
        rows = [
            _result_row(item, job_id, indexes[item.request_id], moment, token, bodies, packed)
            for item in results
        ]
        # State and outcome change together: an open request has none, or this is an error.
        self._insert_results.run(connection, rows)
        ended: dict[RequestState, list[int]] = {}
        for item in results:
            ended.setdefault(_outcome_state(item), []).append(item.request_id)
        for state, ids in ended.items():
            listed = json.dumps(ids) if self._database.is_sqlite else ids
            connection.execute(self._end_requests[state], {"ids": listed, "of_job": job_id})
        more = _counted(results, ended)
        given = [item.request_id for item in results]
        led = self._followers.land(connection, job_id, given, more, token)
        if len(led) == FOLLOWERS_PER_STEP:
            self._unlanded.leaders.append((job_id, given))
        self._count(connection, job_id, more, token, [*given, *led])

    def land_followers(self, connection: Connection, job_id: str, leaders: Collection[int]) -> int:
        """Land the followers of those leaders that have ended; returns how many landed.

        If it returns FOLLOWERS_PER_STEP, more may be left.
        """
        if not leaders:
            return 0
        ended = (
            sa.select(request.c.id)
            .where(
                request.c.id.in_(leaders),
                InPartOf(request.c.id, job_id),
                request.c.state.in_(COUNTED_STATES),
            )
            .order_by(request.c.id)
            # Whoever ends one now sees its followers, or this transaction sees its end.
            .with_for_update()
        )
        more = _counted((), {})
        ids, token = list(connection.scalars(ended)), new_token()
        landed = self._followers.land(connection, job_id, ids, more, token)
        if landed:
            self._count(connection, job_id, more, token, landed)
        return len(landed)

    def land_some(self, connection: Connection, job_id: str) -> int:
        """Land some followers of the job whose leaders have ended; returns how many."""
        leaders = list(connection.scalars(_FOLLOWED, {"job": job_id}))
        return self.land_followers(connection, job_id, leaders)

    def _count(
        self,
        connection: Connection,
        job_id: str,
        more: Mapping[str, int],
        token: int,
        ids: Sequence[int],
    ) -> None:
        """Add to the job's counters, and add these requests to its order of landing.

        The last request of a job also gives the job its final state.
        """
        self._database.tally.note(more)
        added = {f"more_{name}": number for name, number in more.items()} | {"today": today()}
        counted = self._count_and_note.run(connection, job_id, added, token, ids)
        _end_if_over(connection, job_id, counted)

    def end_if_over(self, connection: Connection, job_id: str) -> None:
        """Give a job its final state if all of its rows have their outcome and none can come.

        For jobs that no longer take rows: the last outcome may have landed before.
        """
        standing = connection.execute(_STANDING, {"of_job": job_id}).one_or_none()
        if standing is not None:
            _end_if_over(connection, job_id, standing)


def _end_if_over(connection: Connection, job_id: str, counted: AnyRow) -> None:
    ended = counted.completed + counted.failed + counted.cancelled
    if counted.takes_rows or ended < counted.total:
        return
    final = lifecycle.final_job_state(counted.completed, counted.failed, stop_reason(counted))
    sources = lifecycle.states_before(lifecycle.JOB_TRANSITIONS, final)
    ending = (
        sa.update(job)
        .where(job.c.id == job_id, job.c.state.in_(sources))
        .values(state=final, finished_at=now())
        .returning(IS_AWAITED)
    )
    if connection.scalar(ending):
        announce_end(connection, job_id)


class _Unlanded(threading.local):
    """Leaders that a transaction of this thread has ended without all of their followers."""

    def __init__(self) -> None:
        self.leaders: list[tuple[str, Sequence[int]]] = []

    def take(self) -> list[tuple[str, Sequence[int]]]:
        """Return them and forget them."""
        taken, self.leaders = self.leaders, []
        return taken


def _counted(
    landed: Sequence[NewResult], ended: Mapping[RequestState, list[int]]
) -> dict[str, int]:
    """What outcomes add to each of the job's counters."""
    more = {name: sum(map(attrgetter(name), landed)) for name in TOKEN_COUNTS}
    more |= {name: len(ended.get(state, ())) for state, name in COUNTED_STATES.items()}
    reused = [item.prompt_tokens + item.completion_tokens for item in landed if item.reused]
    return more | {"reused": len(reused), "reused_tokens": sum(reused)}


def _outcome_state(item: NewResult) -> RequestState:
    """The last state of a request with this outcome."""
    if item.error is None:
        return RequestState.DONE
    is_stopped = item.error.code in STOPPED_CODES
    return RequestState.CANCELLED if is_stopped else RequestState.FAILED


def _end_requests(database: Database, state: RequestState) -> sa.Update:
    """The statement that gives requests their last state.

    Its parameters are `of_job` and `ids`, an array, on SQLite one in JSON.
    """
    is_given: sa.ColumnElement[bool]
    if database.is_sqlite:
        listed = sa.func.json_each(sa.bindparam("ids", type_=sa.Text)).table_valued("value")
        is_given = request.c.id.in_(sa.select(listed.c.value))
    else:
        is_given = request.c.id == sa.any_(sa.bindparam("ids", type_=sa.ARRAY(sa.BigInteger)))
    sources = lifecycle.states_before(lifecycle.REQUEST_TRANSITIONS, state)
    in_part = InPartOf(request.c.id, sa.bindparam("of_job", type_=sa.Text))
    statement = sa.update(request).where(is_given, in_part, request.c.state.in_(sources))
    return statement.values(state=state)


def _result_row(
    item: NewResult,
    job_id: str,
    index: int,
    moment: object,
    token: int,
    bodies: Mapping[int, str],
    packed: Mapping[int, Stored],
) -> tuple[Any, ...]:
    """The result's values in the order of the table's columns."""
    error = item.error
    stored = packed.get(item.request_id)
    return (
        item.request_id,
        job_id,
        index,
        item.status_code,
        None if stored else bodies.get(item.request_id),
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
        *(stored or Stored()),
    )
