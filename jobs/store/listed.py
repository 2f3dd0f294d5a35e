"""Conditions on ids that are given as a list, in one parameter however many they are."""

import json
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement


class _Ids(sa.TypeDecorator[Collection[int]]):
    """An array on PostgreSQL, JSON on SQLite."""

    impl = sa.Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> sa.types.TypeEngine[Any]:
        """The type that the driver takes."""
        kind = sa.ARRAY(sa.BigInteger) if dialect.name == "postgresql" else sa.Text()
        return dialect.type_descriptor(kind)

    def process_bind_param(self, value: Collection[int] | None, dialect: Dialect) -> Any:  # noqa: ANN401
        """The list as the driver takes it."""
        listed = list(value or ())
        return listed if dialect.name == "postgresql" else json.dumps(listed)


class IsListed(FunctionElement[bool]):
    """Whether an id is in a list: `IsListed(request.c.id, ids("given"))`."""

    type = sa.Boolean()
    inherit_cache = True


def ids(name: str) -> sa.BindParameter[Collection[int]]:
    """A parameter whose value is a list of ids."""
    return sa.bindparam(name, type_=_Ids())


def listed_ids(given: Collection[int]) -> sa.BindParameter[Collection[int]]:
    """The same with its value."""
    return sa.literal(given, _Ids())


@compiles(IsListed)
def _in_array(element: IsListed, compiler: SQLCompiler, **options: Any) -> str:
    id_, given = (compiler.process(one, **options) for one in element.clauses)
    return f"{id_} = ANY ({given})"


@compiles(IsListed, "sqlite")
def _in_json(element: IsListed, compiler: SQLCompiler, **options: Any) -> str:
    id_, given = (compiler.process(one, **options) for one in element.clauses)
    return f"{id_} IN (SELECT value FROM json_each({given}))"  # noqa: S608
