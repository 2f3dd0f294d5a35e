"""Finalize: the leading planner counts the result files of batches that are over.

A result file is a view of the job's results. Its size is the sum of its lines, which are counted
once. The lines of most successes differ in their ids and bodies alone, and the database sums those.
Any other line is written to see how long it is. The count is kept on the way: another planner goes
on from there.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

import msgspec

from nightjar.groups import in_groups
from nightjar.jobs.batch_records import Finalization, RawResult, ResultLengths, ResultShape
from nightjar.jobs.errors import StoreUnavailableError
from nightjar.jobs.lines.batch_lines import json_line
from nightjar.jobs.store import Store
from nightjar.jobs.store.result_lengths import PLAIN_STATUS
from nightjar.jobs.store.results import PAGE_BYTES

logger = logging.getLogger(__name__)

AT_ONCE = 4
"""Batches that are counted by turns."""

_PAGE_ROWS = 10_000
# What the line of a plain success takes beside its custom id and its body.
_FRAME = len(json_line(RawResult(0, 0, "", PLAIN_STATUS, msgspec.Raw(b""), None)))
_TURN_S = 0.1
_BACK_OFF_S = 30.0


class Finalizer:
    """Makes the result files of batches.

    Args:
        store: Where batches, files and results are.
        clock: Monotonic seconds.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._not_before: dict[str, float] = {}  # by job: when to count again

    def step(self) -> bool:
        """Count a part of the results of each batch that is over; whether there was one.

        Raises:
            StoreUnavailableError: The database is away.
        """
        now = self._clock()
        self._not_before = {job: when for job, when in self._not_before.items() if when > now}
        found = self._store.batch_work.to_finalize(AT_ONCE, self._not_before)
        for begun in found:
            try:
                self._count(begun)
            except StoreUnavailableError:
                raise
            except Exception:
                self._not_before[begun.job_id] = now + _BACK_OFF_S
                logger.exception(
                    "a batch cannot be finalized; it is tried again in %.0f s",
                    _BACK_OFF_S,
                    extra={"action": "finalize_failed", "job_id": begun.job_id},
                )
        return bool(found)

    def _count(self, counted: Finalization) -> None:
        """Count for a while; make the files where no row is left."""
        began, before = self._clock(), counted.counted_to
        while self._clock() - began < _TURN_S:
            page = self._store.results.lengths(counted.job_id, counted.counted_to, _PAGE_ROWS)
            if page is None:
                self._finish(counted)
                return
            counted = self._with(counted, page)
        if counted.counted_to > before:
            self._store.batch_work.note_counted(counted)

    def _finish(self, counted: Finalization) -> None:
        if self._store.batch_work.finalize(counted):
            logger.info(
                "a batch has its result files: %d lines of output, %d of errors",
                counted.output.lines,
                counted.errors.lines,
                extra={"action": "batch_finalized", "job_id": counted.job_id},
            )

    def _with(self, counted: Finalization, page: ResultLengths) -> Finalization:
        """The same with the rows of one more page."""
        output, errors = [], []
        reused: list[ResultShape] = []
        for shape in page.others:
            if shape.is_reused and shape.record.error is None:
                reused.append(shape)
                continue
            size = len(json_line(shape.record))
            if shape.record.error is None:
                output.append(size + shape.body_bytes)
            else:
                errors.append(size)
        for part in in_groups(reused, attrgetter("body_bytes"), PAGE_BYTES):
            raw = self._store.results.raw([shape.record.id for shape in part])
            output += [len(json_line(record)) for record in raw]
        return replace(
            counted,
            counted_to=page.counted_to,
            output=counted.output.with_plain(page.plain, _FRAME).with_lines(output),
            errors=counted.errors.with_lines(errors),
        )
