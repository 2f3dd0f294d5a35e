"""Parts: on PostgreSQL the rows of all jobs of one day share partitions, which go as a whole.

A request's id says its part: the part is what the id holds above PART_BITS. A job's id says where
its rows are, too: it begins with its moment, and PART_MARK behind that says that the part is its
day. Rows of other jobs are in part 0: single calls, which are deleted one by one, and jobs of
versions that had no parts. Results and bodies are in the part of their request.

SQLite has no parts.
"""

import re
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

PART_BITS = 40
"""A trillion rows for the sequence of ids; with the days of 20 years an id is below 2^53."""

PART_MARK = "p"
FIRST_DAY = 18_261  # 2019-12-31, in days since 1970: part 1 is the day after it
_DAY_MS = 86_400_000
_IN_A_PART = re.compile(rf"job_([0-9a-f]{{12}}){PART_MARK}")


def part_of_job(job_id: str) -> int:
    """The part of the job's rows, as PostgreSQL's function `nightjar_part` says it."""
    found = _IN_A_PART.match(job_id)
    return int(found[1], 16) // _DAY_MS - FIRST_DAY if found else 0


def part_of_day(day: int) -> int:
    """The part of a day, which is counted from 1970."""
    return day - FIRST_DAY


def first_job_id(part: int) -> str:
    """An id that sorts before those of all jobs of the part, and behind those of older days."""
    return f"job_{(part + FIRST_DAY) * _DAY_MS:012x}"


def parts_of_ids(request_ids: Collection[int]) -> list[int]:
    """The parts that hold these requests."""
    return sorted({id_ >> PART_BITS for id_ in request_ids})


class InPartOf(FunctionElement[bool]):
    """Whether a request's id is in the part of a job: `InPartOf(request.c.id, job_id)`.

    PostgreSQL then reads this partition alone. Always true on SQLite.

    The partitions are of `id >> PART_BITS`, not of ranges of ids. A condition on ranges might use
    the index of ids: without statistics, as on a new day, it looks as good as any other one.
    """

    type = sa.Boolean()
    inherit_cache = True


class InParts(FunctionElement[bool]):
    """The same for parts that are known: `InParts(request.c.id, parts)`, an array of them."""

    type = sa.Boolean()
    inherit_cache = True


@compiles(InPartOf)
def _in_part_of(element: InPartOf, compiler: SQLCompiler, **options: Any) -> str:
    id_, job_id = (compiler.process(one, **options) for one in element.clauses)
    return f"({id_} >> {PART_BITS}) = nightjar_part({job_id})"


@compiles(InParts)
def _in_parts(element: InParts, compiler: SQLCompiler, **options: Any) -> str:
    id_, parts = (compiler.process(one, **options) for one in element.clauses)
    return f"({id_} >> {PART_BITS}) = {parts}"


@compiles(InPartOf, "sqlite")
@compiles(InParts, "sqlite")
def _anywhere(element: FunctionElement[bool], compiler: SQLCompiler, **options: Any) -> str:
    return "1"


def in_parts_of(column: sa.ColumnElement[int], request_ids: Collection[int]) -> InParts:
    """The same for a list of requests."""
    parts = sa.literal(parts_of_ids(request_ids), sa.ARRAY(sa.BigInteger))
    return InParts(column, sa.any_(parts))
