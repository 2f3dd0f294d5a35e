"""Idempotency keys of tenants in one column.

The column is unique over all tenants, and an API of the version before relies on that while the
deployment is upgraded: its INSERT names the column in ON CONFLICT. A unique index over tenant and
key in its place would make every upload to such an API fail from the migration on. So the column
stays, and the keys of tenants are told apart by what is written into it.
"""

import hashlib

from nightjar.jobs.records import DEFAULT_TENANT


def stored_key(tenant: str, key: str | None) -> str | None:
    """What the column holds for a tenant's key: equal only for the same key of the same tenant.

    Keys of `default` stand as they came: all keys of earlier versions are of this tenant. A key of
    another tenant is its name, a line break and the key's SHA-256. HTTP has no header with a line
    break, so `default` has no such key; one that came another way would be hashed as well.
    """
    if key is None or (tenant == DEFAULT_TENANT and "\n" not in key):
        return key
    return f"{tenant}\n{hashlib.sha256(key.encode()).hexdigest()}"
