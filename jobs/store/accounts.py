"""Tenants and the keys of the API: made, listed, changed, rotated and revoked."""

import dataclasses
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.accounts import (
    LIMIT_NAMES,
    PREFIX_LENGTH,
    ApiKey,
    KeyState,
    KnownKey,
    NewKey,
    Tenant,
    TenantLimits,
    checked_key,
    checked_tenant,
    digest_of,
    generate_key,
)
from nightjar.jobs.errors import AccountError
from nightjar.jobs.records import DEFAULT_TENANT
from nightjar.jobs.store.account_tables import api_key, tenant
from nightjar.jobs.store.common import AnyRow, now
from nightjar.jobs.store.database import Database

_KEY_COLUMNS = [api_key.c[one.name] for one in dataclasses.fields(ApiKey)]
# By the prefix, which is unique. Built once: this runs for each key every few seconds.
_KNOWN = (
    sa.select(*_KEY_COLUMNS, api_key.c.sha256, tenant.c.requests_a_minute)
    .join(tenant, tenant.c.name == api_key.c.tenant)
    .where(api_key.c.prefix == sa.bindparam("prefix"))
)


class Accounts:
    """Tenants and keys. The tenant `default` exists in effect, also where no row names it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create_tenant(self, new: Tenant) -> Tenant:
        """Store a tenant; raises AccountError for one that exists or cannot be used."""
        checked_tenant(new)
        values = _values(new) | {"created_at": now()}
        insert = self._database.insert(tenant).values(values).on_conflict_do_nothing()
        inserted = insert.returning(tenant.c.name)

        def work(connection: Connection) -> Tenant:
            if connection.scalar(inserted) is None:
                raise AccountError(
                    f"there is a tenant {new.name!r} already; change it by "
                    f"`nightjar tenants set {new.name}`"
                )
            return _find_tenant(connection, new.name)

        return self._database.write(work)

    def change_tenant(
        self, name: str, *, weight: float | None = None, **limits: int | None
    ) -> Tenant:
        """Set the given limits (None for any amount) and, if given, the weight; others stay.

        Raises:
            AccountError: There is no such tenant, or a value cannot be used.
        """

        def work(connection: Connection) -> Tenant:
            found = _find_tenant(connection, name)
            changed = dataclasses.replace(
                found,
                weight=found.weight if weight is None else weight,
                limits=dataclasses.replace(found.limits, **limits),
            )
            values = _values(checked_tenant(changed))
            self._ensure_default(connection, name)
            connection.execute(sa.update(tenant).where(tenant.c.name == name).values(values))
            return _find_tenant(connection, name)

        return self._database.write(work)

    def tenants(self) -> list[Tenant]:
        """All tenants by name; `default` is always among them."""
        with self._database.reading() as connection:
            found = [_tenant(row) for row in connection.execute(sa.select(tenant))]
        if DEFAULT_TENANT not in {one.name for one in found}:
            found.append(Tenant(DEFAULT_TENANT))
        return sorted(found, key=lambda one: one.name)

    def tenant(self, name: str) -> Tenant:
        """The tenant of this name; raises AccountError."""
        with self._database.reading() as connection:
            return _find_tenant(connection, name)

    def create_key(self, new: NewKey) -> tuple[str, ApiKey]:
        """Make a key; returns the whole key, which is stored nowhere, and its record.

        Raises:
            AccountError: There is no such tenant, or label or expiry cannot be used.
        """

        def work(connection: Connection) -> tuple[str, ApiKey]:
            _find_tenant(connection, new.tenant)
            self._ensure_default(connection, new.tenant)
            return _insert_key(connection, new, now())

        return self._database.write(work)

    def rotate_key(
        self, prefix: str, *, grace: timedelta, expires_at: datetime | None = None
    ) -> tuple[str, ApiKey]:
        """Make a key in the place of another one, which ends after the grace time or before.

        The new key has the tenant, the scope and the label of the old one. Without `expires_at` it
        lives as long as the old one was given.

        Raises:
            AccountError: There is no such key, or it has ended already.
        """

        def work(connection: Connection) -> tuple[str, ApiKey]:
            old, moment = _lock_key(connection, prefix), now()
            if (state := old.state(moment)) is not KeyState.USABLE:
                raise AccountError(
                    f"the key {prefix} is {state}, and nothing can take its place; make another "
                    "by `nightjar keys create`"
                )
            ends_at = expires_at
            if ends_at is None and old.expires_at is not None:
                ends_at = moment + (old.expires_at - old.created_at)
            new = NewKey(old.tenant, old.scope, old.label, ends_at)
            made = _insert_key(connection, new, moment)
            old_ends_at = moment + grace
            if old.expires_at is None or old_ends_at < old.expires_at:
                _update_key(connection, prefix, expires_at=old_ends_at)
            return made

        return self._database.write(work)

    def revoke_key(self, prefix: str) -> ApiKey:
        """End a key now; one that was revoked before stays as it is. Raises AccountError."""

        def work(connection: Connection) -> ApiKey:
            if _lock_key(connection, prefix).revoked_at is None:
                _update_key(connection, prefix, revoked_at=now())
            return _lock_key(connection, prefix)

        return self._database.write(work)

    def keys(self, tenant_name: str | None = None) -> list[ApiKey]:
        """The keys of one tenant or of all, the oldest first; revoked and expired ones, too."""
        statement = sa.select(*_KEY_COLUMNS).order_by(api_key.c.id)
        if tenant_name is not None:
            statement = statement.where(api_key.c.tenant == tenant_name)
        with self._database.reading() as connection:
            if tenant_name is not None:
                _find_tenant(connection, tenant_name)
            return [ApiKey(*row) for row in connection.execute(statement)]

    def known_key(self, prefix: str) -> KnownKey | None:
        """The key with this prefix, whatever became of it; None if there is none."""
        with self._database.reading() as connection:
            row = connection.execute(_KNOWN, {"prefix": prefix}).one_or_none()
        return None if row is None else KnownKey(ApiKey(*row[:-2]), *row[-2:])

    def has_keys(self) -> bool:
        """Whether a key was ever made, be it revoked or expired."""
        with self._database.reading() as connection:
            return connection.execute(sa.select(api_key.c.id).limit(1)).first() is not None

    def has_usable_key(self) -> bool:
        """Whether a key opens the API now."""
        row = api_key.c
        still = sa.or_(row.expires_at.is_(None), row.expires_at > now())
        statement = sa.select(row.id).where(row.revoked_at.is_(None), still).limit(1)
        with self._database.reading() as connection:
            return connection.execute(statement).first() is not None

    def _ensure_default(self, connection: Connection, name: str) -> None:
        """Store the tenant `default`, if it is the one: keys refer to a row."""
        if name == DEFAULT_TENANT:
            values = _values(Tenant(DEFAULT_TENANT)) | {"created_at": now()}
            insert = self._database.insert(tenant).values(values)
            connection.execute(insert.on_conflict_do_nothing())


def _find_tenant(connection: Connection, name: str) -> Tenant:
    checked_tenant(Tenant(name))
    row = connection.execute(sa.select(tenant).where(tenant.c.name == name)).one_or_none()
    if row is not None:
        return _tenant(row)
    if name == DEFAULT_TENANT:
        return Tenant(DEFAULT_TENANT)
    raise AccountError(
        f"there is no tenant {name!r}; make it by `nightjar tenants create {name}`, or see "
        "`nightjar tenants list`"
    )


def _tenant(row: AnyRow) -> Tenant:
    limits = TenantLimits(**{name: getattr(row, name) for name in LIMIT_NAMES})
    return Tenant(row.name, row.weight, limits, row.created_at)


def _values(of: Tenant) -> dict[str, Any]:
    limits = {name: getattr(of.limits, name) for name in LIMIT_NAMES}
    return {"name": of.name, "weight": of.weight, **limits}


def _insert_key(connection: Connection, new: NewKey, moment: datetime) -> tuple[str, ApiKey]:
    checked_key(new, moment)
    key = generate_key()
    values = {
        "tenant": new.tenant,
        "prefix": key[:PREFIX_LENGTH],
        "sha256": digest_of(key),
        "scope": new.scope,
        "label": new.label,
        "created_at": moment,
        "expires_at": new.expires_at,
    }
    # Two equal prefixes in 2**41 are not to be expected; the unique index would refuse the second.
    row = connection.execute(sa.insert(api_key).values(values).returning(*_KEY_COLUMNS)).one()
    return key, ApiKey(*row)


def _lock_key(connection: Connection, prefix: str) -> ApiKey:
    statement = sa.select(*_KEY_COLUMNS).where(api_key.c.prefix == prefix).with_for_update()
    row = connection.execute(statement).one_or_none()
    if row is None:
        raise AccountError(f"there is no key {prefix}; `nightjar keys list` shows them")
    return ApiKey(*row)


def _update_key(connection: Connection, prefix: str, **values: datetime) -> None:
    connection.execute(sa.update(api_key).where(api_key.c.prefix == prefix).values(values))
