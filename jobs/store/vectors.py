"""Prompt vectors and LoRA adapters: named, versioned, never changed once stored; with aliases."""

import hashlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.errors import (
    StoreError,
    UnknownVectorError,
    VectorAliasError,
    VectorKindError,
)
from nightjar.jobs.records import EncodedRequest
from nightjar.jobs.store.common import now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.vector_tables import job_prompt_vector, prompt_vector, prompt_vector_alias
from nightjar.jobs.vector_records import (
    LATEST,
    LORA,
    VECTORS,
    Kind,
    PromptVector,
    VectorAlias,
    VectorFile,
    is_alias,
    split_reference,
)

_row = prompt_vector.c
_FIELDS = [_row[name] for name in PromptVector.__slots__]
_WITHOUT_DATA = [
    sa.literal(b"", sa.LargeBinary).label("data") if name == "data" else _row[name]
    for name in PromptVector.__slots__
]
_AT_ONCE = 400  # names, references or versions in one statement

Version = tuple[str, int]
Item = TypeVar("Item")


class Vectors:
    """Prompt vectors and LoRA adapters by name and version."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(
        self,
        name: str,
        data: bytes,
        length: int,
        width: int,
        sha256: str,
        fingerprint: str | None = None,
        kind: Kind = VECTORS,
    ) -> PromptVector:
        """Store vectors as the name's newest version, and let `latest` name it.

        The same bytes as the newest version's are no new version. `data` is a safetensors file of
        `length` vectors of `width` numbers; `fingerprint` is of the model that they are for.
        Of a LoRA adapter, `length` is its rank.

        Raises:
            StoreError: `sha256` (hex) is not the digest of `data`.
            VectorKindError: The name's versions are of the other kind.
        """
        if hashlib.sha256(data).hexdigest() != sha256:
            raise StoreError(f"prompt vector {name!r}: the sha256 is not that of its bytes")

        def work(connection: Connection) -> PromptVector | None:
            newest = _newest(connection, name)
            if newest is not None and newest.kind != kind:
                raise VectorKindError(name, newest.kind)
            if newest is not None and newest.sha256 == sha256:
                self._point(connection, VectorAlias(name, LATEST, newest.version), forward=True)
                return replace(newest, data=data)
            version = newest.version + 1 if newest else 1
            record = PromptVector(name, version, sha256, length, width, data, fingerprint, kind)
            values = {column.name: getattr(record, column.name) for column in _FIELDS}
            statement = self._database.insert(prompt_vector).values(**values, created_at=now())
            inserted = connection.scalar(
                statement.on_conflict_do_nothing(
                    index_elements=[_row.name, _row.version]
                ).returning(_row.id)
            )
            if inserted is None:
                return None
            self._point(connection, VectorAlias(name, LATEST, version), forward=True)
            return record

        # None: somebody else stored this version at the same moment.
        while (stored := self._database.write(work)) is None:
            pass
        return stored

    def get(self, name: str, version: int | None = None) -> PromptVector | None:
        """The vectors of this name and version, by default the latest; None if there are none."""
        with self._database.reading() as connection:
            wanted = _latest(connection, name) if version is None else version
            found = connection.execute(
                sa.select(*_FIELDS).where(_row.name == name, _row.version == wanted)
            ).one_or_none()
        return None if found is None else PromptVector(*found)

    def data(self, keys: Collection[str]) -> dict[str, VectorFile]:
        """The safetensors files of these `name@version`; those that do not exist are left out."""
        versions = {_version(key): key for key in keys}
        found: dict[str, VectorFile] = {}
        with self._database.reading() as connection:
            for some in _parts(versions):
                rows = connection.execute(
                    sa.select(_row.name, _row.version, _row.data, _row.kind).where(_is_one_of(some))
                )
                found |= {
                    versions[name, version]: VectorFile(data, kind)
                    for name, version, data, kind in rows
                }
        return found

    def has_adapters(self, fingerprint: str) -> bool:
        """Whether there is a LoRA adapter of a model."""
        asked = sa.exists().where(_row.kind == LORA, _row.fingerprint == fingerprint)
        with self._database.reading() as connection:
            return bool(connection.scalar(sa.select(asked)))

    def resolve(
        self, references: Collection[str], job_id: str | None = None
    ) -> dict[str, PromptVector]:
        """The versions, without their data, that references mean; unknown ones are left out.

        A reference is `NAME`, `NAME@VERSION` or `NAME@ALIAS`. What a job's plan has used before
        keeps its version, see `keep_versions`.
        """
        with self._database.reading() as connection:
            kept = {} if job_id is None else _kept(connection, job_id, references)
            aliases = _aliases(connection, {split_reference(one)[0] for one in references})
            meant: dict[str, Version] = {}
            for reference in references:
                name, selector = split_reference(reference)
                version = kept.get(reference, selector)
                if isinstance(version, str):
                    version = aliases.get((name, version), 0)
                meant[reference] = name, version
            found = _records(connection, set(meant.values()))
        return {one: found[version] for one, version in meant.items() if version in found}

    def versions(self, name: str | None = None, limit: int = 1000) -> list[PromptVector]:
        """The versions, without their data: of one name, newest first, or the latest of each."""
        statement = sa.select(*_WITHOUT_DATA).limit(limit)
        if name is not None:
            statement = statement.where(_row.name == name).order_by(_row.version.desc())
        else:
            alias = prompt_vector_alias.c
            latest = (alias.name == _row.name) & (alias.version == _row.version)
            statement = statement.join(prompt_vector_alias, latest & (alias.alias == LATEST))
            statement = statement.order_by(_row.name)
        with self._database.reading() as connection:
            return [PromptVector(*found) for found in connection.execute(statement)]

    def aliases(self, names: Collection[str]) -> list[VectorAlias]:
        """All aliases of these names, sorted."""
        with self._database.reading() as connection:
            found = _aliases(connection, names)
        return [VectorAlias(name, alias, found[name, alias]) for name, alias in sorted(found)]

    def tag(self, name: str, alias: str, version: int | None = None) -> VectorAlias:
        """Let an alias name a version, by default the latest one.

        Raises:
            UnknownVectorError: There is no such version.
            VectorAliasError: The alias cannot be one.
        """
        if alias == LATEST or not is_alias(alias):
            raise VectorAliasError(alias)

        def work(connection: Connection) -> VectorAlias:
            wanted = version or _latest(connection, name)
            made = VectorAlias(name, alias, _existing(connection, name, wanted))
            self._point(connection, made)
            return made

        return self._database.write(work)

    def roll_back(self, name: str, version: int | None = None) -> VectorAlias:
        """Let `latest` name an earlier version, by default the one before; nothing is deleted.

        The next version that is registered becomes the latest. Jobs that have begun keep theirs.

        Raises:
            UnknownVectorError: There is no such version.
        """

        def work(connection: Connection) -> VectorAlias:
            wanted = version
            if wanted is None:
                before = _row.version < _latest(connection, name)
                wanted = connection.scalar(
                    sa.select(sa.func.max(_row.version)).where(_row.name == name, before)
                )
            made = VectorAlias(name, LATEST, _existing(connection, name, wanted or 0))
            self._point(connection, made)
            return made

        return self._database.write(work)

    def _point(self, connection: Connection, alias: VectorAlias, *, forward: bool = False) -> None:
        """Set an alias; with `forward`, never to an earlier version than it names."""
        column = prompt_vector_alias.c
        statement = self._database.insert(prompt_vector_alias).values(
            name=alias.name, alias=alias.alias, version=alias.version
        )
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=[column.name, column.alias],
                set_={"version": statement.excluded.version},
                where=column.version < statement.excluded.version if forward else None,
            )
        )


def keep_versions(
    database: Database, connection: Connection, job_id: str, planned: Iterable[EncodedRequest]
) -> None:
    """Let a job keep the versions that its requests' references mean; kept ones stay."""
    meant = {
        reference: _version(key)[1]
        for item in planned
        for reference, key in (
            (item.vector_reference, item.prompt_vector),
            (item.adapter_reference, item.adapter),
        )
        if reference is not None and key is not None
    }
    table = job_prompt_vector
    rows = [
        {"job_id": job_id, "reference": reference, "version": meant[reference]}
        for reference in sorted(meant)
    ]
    if rows:
        statement = database.insert(table).on_conflict_do_nothing(
            index_elements=[table.c.job_id, table.c.reference]
        )
        connection.execute(statement, rows)


def delete_kept(connection: Connection, job_id: str, most: int) -> int:
    """Delete at most so many of the versions that a job keeps; returns how many."""
    column = job_prompt_vector.c
    some = sa.select(column.reference).where(column.job_id == job_id).order_by(column.reference)
    references = connection.scalars(some.limit(most)).all()
    if references:
        own = (column.job_id == job_id, column.reference.in_(references))
        connection.execute(sa.delete(job_prompt_vector).where(*own))
    return len(references)


def _newest(connection: Connection, name: str) -> PromptVector | None:
    statement = sa.select(*_WITHOUT_DATA).where(_row.name == name)
    found = connection.execute(statement.order_by(_row.version.desc()).limit(1)).one_or_none()
    return None if found is None else PromptVector(*found)


def _latest(connection: Connection, name: str) -> int:
    """The version that `latest` names; 0 if there is none."""
    return _aliases(connection, [name]).get((name, LATEST), 0)


def _existing(connection: Connection, name: str, version: int) -> int:
    """The version, if it is stored; raises UnknownVectorError."""
    if (name, version) not in _records(connection, [(name, version)]):
        raise UnknownVectorError(name, version)
    return version


def _aliases(connection: Connection, names: Collection[str]) -> dict[tuple[str, str], int]:
    """The versions of the aliases of these names."""
    column = prompt_vector_alias.c
    found: dict[tuple[str, str], int] = {}
    for some in _parts(names):
        statement = sa.select(column.name, column.alias, column.version)
        rows = connection.execute(statement.where(column.name.in_(some)))
        found |= {(name, alias): version for name, alias, version in rows}
    return found


def _kept(connection: Connection, job_id: str, references: Collection[str]) -> dict[str, int]:
    """The versions that the job has used for these references."""
    column = job_prompt_vector.c
    found: dict[str, int] = {}
    for some in _parts(references):
        statement = sa.select(column.reference, column.version)
        rows = connection.execute(
            statement.where(column.job_id == job_id, column.reference.in_(some))
        )
        found |= {row.reference: row.version for row in rows}
    return found


def _records(connection: Connection, versions: Collection[Version]) -> dict[Version, PromptVector]:
    """The stored versions among these, without their data."""
    found: dict[Version, PromptVector] = {}
    for some in _parts(versions):
        rows = connection.execute(sa.select(*_WITHOUT_DATA).where(_is_one_of(some)))
        records = [PromptVector(*row) for row in rows]
        found |= {(one.name, one.version): one for one in records}
    return found


def _version(key: str) -> Version:
    """The version that a plan names as `name@version`."""
    name, _, version = key.rpartition("@")
    return name, int(version)


def _parts(items: Collection[Item]) -> Iterator[list[Item]]:
    """Parts of the items, each small enough for one statement."""
    every = list(items)
    for start in range(0, len(every), _AT_ONCE):
        yield every[start : start + _AT_ONCE]


def _is_one_of(versions: Collection[Version]) -> sa.ColumnElement[bool]:
    return sa.tuple_(_row.name, _row.version).in_(list(versions))
