"""Commands for tenants and their keys; they work on the database itself."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nightjar.jobs.records import DEFAULT_TENANT
from nightjar.jobs.states import Scope
from nightjar.pipeline.front.cli.console import (
    EXIT_USAGE,
    AsJson,
    fail,
    print_json,
    read_settings,
    say,
)
from nightjar.pipeline.front.cli.spans import parse_span
from nightjar.pipeline.front.cli.stored import opened_store, print_table, shown
from nightjar.pipeline.front.cli.tenant_options import TenantOptions, takes_tenant_options

if TYPE_CHECKING:
    from nightjar.jobs.accounts import ApiKey, Tenant

keys = typer.Typer(
    name="keys", help="Make, list, rotate and revoke keys of the API.", no_args_is_help=True
)
tenants = typer.Typer(
    name="tenants", help="Make and list tenants, and set their limits.", no_args_is_help=True
)

Prefix = Annotated[str, typer.Argument(help="The beginning of the key, such as nj_k3x09ab7.")]
Expires = Annotated[
    str | None, typer.Option("--expires", metavar="90d", help="How long it is valid.")
]
Name = Annotated[str, typer.Argument(help="Lower-case letters, digits, '-', '_' and '.'.")]


@keys.command("create")
def create_key(
    tenant: Annotated[str, typer.Option(help="Whose key it is.")] = DEFAULT_TENANT,
    scope: Annotated[
        Scope, typer.Option(help="Each includes those before it: read, submit, admin.")
    ] = Scope.SUBMIT,
    label: Annotated[str, typer.Option(help="What the key is for; shown in the list.")] = "",
    expires: Expires = None,
    as_json: AsJson = False,
) -> None:
    """Make a key, and print it: it is stored nowhere, and is shown only now.

    Example: KEY=$(nightjar keys create --tenant owls --scope submit)
    """
    from nightjar.jobs.accounts import NewKey

    expires_at = _moment(expires)
    with opened_store(read_settings()) as store:
        key, made = store.accounts.create_key(NewKey(tenant, scope, label, expires_at))
    _show_new(key, made, as_json)


@keys.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Only the keys of this tenant.")] = None,
    as_json: AsJson = False,
) -> None:
    """List keys by their prefixes, with what became of them.

    Example: nightjar keys list --tenant owls
    """
    with opened_store(read_settings()) as store:
        found = store.accounts.keys(tenant)
    rows = [_key_payload(key) for key in found]
    if as_json:
        print_json(rows, as_json=True)
        return
    print_table(rows, ("prefix", "tenant", "scope", "state", "created_at", "expires_at", "label"))


@keys.command("rotate")
def rotate_key(
    prefix: Prefix,
    grace: Annotated[
        str, typer.Option(metavar="24h", help="How long the old key stays valid; 0m for not.")
    ] = "24h",
    expires: Expires = None,
    as_json: AsJson = False,
) -> None:
    """Make a new key in the place of one, which ends after the grace time.

    Example: nightjar keys rotate nj_k3x09ab7 --grace 24h
    """
    from nightjar.jobs.accounts import prefix_of

    expires_at, kept_for = _moment(expires), parse_span(grace)
    with opened_store(read_settings()) as store:
        old = prefix_of(prefix)
        key, made = store.accounts.rotate_key(old, grace=kept_for, expires_at=expires_at)
    say(f"{old} stays valid for {grace} at most")
    _show_new(key, made, as_json)


@keys.command("revoke")
def revoke_key(prefix: Prefix, as_json: AsJson = False) -> None:
    """End a key now; a running API notices it within 5 seconds.

    Example: nightjar keys revoke nj_k3x09ab7
    """
    from nightjar.jobs.accounts import prefix_of

    with opened_store(read_settings()) as store:
        revoked = store.accounts.revoke_key(prefix_of(prefix))
    if as_json:
        print_json(_key_payload(revoked), as_json=True)
    else:
        typer.echo(f"{revoked.prefix} is revoked")


@tenants.command("create")
@takes_tenant_options
def create_tenant(name: Name, options: TenantOptions, as_json: AsJson = False) -> None:
    """Make a tenant: its jobs and files are seen by its own keys alone.

    Example: nightjar tenants create owls --weight 2
    """
    from nightjar.jobs.accounts import Tenant, TenantLimits

    weight = 1.0 if options.weight is None else options.weight
    new = Tenant(name, weight, TenantLimits(**options.limits()))
    with opened_store(read_settings()) as store:
        _show_tenant(store.accounts.create_tenant(new), as_json)


@tenants.command("list")
def list_tenants(as_json: AsJson = False) -> None:
    """List tenants and their limits; `-` is no limit.

    Example: nightjar tenants list --json
    """
    with opened_store(read_settings()) as store:
        rows = [_tenant_payload(tenant) for tenant in store.accounts.tenants()]
    if as_json:
        print_json(rows, as_json=True)
        return
    print_table(rows, tuple(rows[0]))


@tenants.command("set")
@takes_tenant_options
def set_tenant(name: Name, options: TenantOptions, as_json: AsJson = False) -> None:
    """Change a tenant's weight or limits; what is not named stays. `none` lifts a limit.

    Example: nightjar tenants set owls --rows-waiting 100000 --keep-results 90d
    """
    limits = options.limits()
    if options.weight is None and not limits:
        fail("name what to change, such as --tokens-a-day 1000000 or --weight 3", EXIT_USAGE)
    with opened_store(read_settings()) as store:
        changed = store.accounts.change_tenant(name, weight=options.weight, **limits)
        _show_tenant(changed, as_json)


def _moment(span: str | None) -> datetime | None:
    if span is None:
        return None
    lasts = parse_span(span)
    if not lasts:
        fail(f"{span!r}: the key would have expired already", EXIT_USAGE)
    return datetime.now(UTC) + lasts


def _show_new(key: str, made: "ApiKey", as_json: bool) -> None:
    """Print the key alone, so that KEY=$(nightjar keys create) works; the rest is for people."""
    say(f"{made.prefix}: a key of {made.tenant} with the scope {made.scope}; it is shown only now")
    if as_json:
        print_json({"key": key} | _key_payload(made), as_json=True)
    else:
        typer.echo(key)


def _show_tenant(tenant: "Tenant", as_json: bool) -> None:
    payload = _tenant_payload(tenant)
    if as_json:
        print_json(payload, as_json=True)
    else:
        print_table([payload], tuple(payload))


def _key_payload(key: "ApiKey") -> dict[str, Any]:
    return {
        "prefix": key.prefix,
        "tenant": key.tenant,
        "scope": key.scope.value,
        "label": key.label,
        "state": key.state(datetime.now(UTC)).value,
        "created_at": shown(key.created_at),
        "expires_at": shown(key.expires_at),
        "revoked_at": shown(key.revoked_at),
    }


def _tenant_payload(tenant: "Tenant") -> dict[str, Any]:
    from nightjar.jobs.accounts import LIMIT_NAMES

    limits = {name: getattr(tenant.limits, name) for name in LIMIT_NAMES}
    return {"name": tenant.name, "weight": tenant.weight, **limits}
