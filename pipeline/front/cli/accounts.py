"""Commands for tenants and their keys; they work on the database itself."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nightjar.jobs.records import DEFAULT_TENANT
from nightjar.jobs.states import Scope
from nightjar.pipeline.front.cli.console import EXIT_USAGE, check_driver, fail, read_settings, say
from nightjar.pipeline.front.cli.spans import parse_span

if TYPE_CHECKING:
    from nightjar.jobs.accounts import ApiKey, Tenant
    from nightjar.jobs.store.accounts import Accounts

keys = typer.Typer(
    name="keys", help="Make, list, rotate and revoke keys of the API.", no_args_is_help=True
)
tenants = typer.Typer(
    name="tenants", help="Make and list tenants, and set their limits.", no_args_is_help=True
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Prefix = Annotated[str, typer.Argument(help="The beginning of the key, such as nj_k3x09ab7.")]
Expires = Annotated[
    str | None, typer.Option("--expires", metavar="90d", help="How long it is valid.")
]
Name = Annotated[str, typer.Argument(help="Lower-case letters, digits, '-', '_' and '.'.")]
Weight = Annotated[
    float | None,
    typer.Option(help="Its share of the computed tokens beside other tenants (1 unless given)."),
]
Requests = Annotated[
    str | None,
    typer.Option("--requests-a-minute", metavar="N", help="Most requests a minute, or none."),
]
Tokens = Annotated[
    str | None, typer.Option("--tokens-a-day", metavar="N", help="Most tokens a day, or none.")
]
Rows = Annotated[
    str | None, typer.Option("--rows-waiting", metavar="N", help="Most rows that wait, or none.")
]
Bytes = Annotated[
    str | None, typer.Option("--bytes-stored", metavar="N", help="Most bytes of files, or none.")
]
KeepResults = Annotated[
    str | None,
    typer.Option(
        "--keep-results",
        metavar="30d",
        help="How long after a job's end its results are kept; none: as the deployment says.",
    ),
]

_ANY = "none"


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
    """Make a key, and print it: it is stored nowhere, and is shown only now."""
    from nightjar.jobs.accounts import NewKey

    expires_at = _moment(expires)
    with _accounts() as accounts:
        key, made = accounts.create_key(NewKey(tenant, scope, label, expires_at))
    _show_new(key, made, as_json)


@keys.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Only the keys of this tenant.")] = None,
    as_json: AsJson = False,
) -> None:
    """List keys by their prefixes, with what became of them."""
    with _accounts() as accounts:
        found = accounts.keys(tenant)
    rows = [_key_payload(key) for key in found]
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    _table(rows, ("prefix", "tenant", "scope", "state", "created_at", "expires_at", "label"))


@keys.command("rotate")
def rotate_key(
    prefix: Prefix,
    grace: Annotated[
        str, typer.Option(metavar="24h", help="How long the old key stays valid; 0m for not.")
    ] = "24h",
    expires: Expires = None,
    as_json: AsJson = False,
) -> None:
    """Make a new key in the place of one, which ends after the grace time."""
    from nightjar.jobs.accounts import prefix_of

    expires_at, kept_for = _moment(expires), parse_span(grace)
    with _accounts() as accounts:
        old = prefix_of(prefix)
        key, made = accounts.rotate_key(old, grace=kept_for, expires_at=expires_at)
    say(f"{old} stays valid for {grace} at most")
    _show_new(key, made, as_json)


@keys.command("revoke")
def revoke_key(prefix: Prefix, as_json: AsJson = False) -> None:
    """End a key now; a running API notices it within 5 seconds."""
    from nightjar.jobs.accounts import prefix_of

    with _accounts() as accounts:
        revoked = accounts.revoke_key(prefix_of(prefix))
    if as_json:
        typer.echo(json.dumps(_key_payload(revoked), indent=2, ensure_ascii=False))
    else:
        typer.echo(f"{revoked.prefix} is revoked")


@tenants.command("create")
def create_tenant(  # noqa: PLR0913, PLR0917 - its options
    name: Name,
    weight: Weight = None,
    requests_a_minute: Requests = None,
    tokens_a_day: Tokens = None,
    rows_waiting: Rows = None,
    bytes_stored: Bytes = None,
    keep_results: KeepResults = None,
    as_json: AsJson = False,
) -> None:
    """Make a tenant: its jobs and files are seen by its own keys alone."""
    from nightjar.jobs.accounts import Tenant, TenantLimits

    limits = _limits(
        requests_a_minute=requests_a_minute,
        tokens_a_day=tokens_a_day,
        rows_waiting=rows_waiting,
        bytes_stored=bytes_stored,
    )
    limits |= _keep_s(keep_results)
    new = Tenant(name, 1.0 if weight is None else weight, TenantLimits(**limits))
    with _accounts() as accounts:
        _show_tenant(accounts.create_tenant(new), as_json)


@tenants.command("list")
def list_tenants(as_json: AsJson = False) -> None:
    """List tenants and their limits; `-` is no limit."""
    with _accounts() as accounts:
        rows = [_tenant_payload(tenant) for tenant in accounts.tenants()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    _table(rows, tuple(rows[0]))


@tenants.command("set")
def set_tenant(  # noqa: PLR0913, PLR0917 - its options
    name: Name,
    weight: Weight = None,
    requests_a_minute: Requests = None,
    tokens_a_day: Tokens = None,
    rows_waiting: Rows = None,
    bytes_stored: Bytes = None,
    keep_results: KeepResults = None,
    as_json: AsJson = False,
) -> None:
    """Change a tenant's weight or limits; what is not named stays. `none` lifts a limit."""
    limits = _limits(
        requests_a_minute=requests_a_minute,
        tokens_a_day=tokens_a_day,
        rows_waiting=rows_waiting,
        bytes_stored=bytes_stored,
    )
    limits |= _keep_s(keep_results)
    if weight is None and not limits:
        fail("name what to change, such as --tokens-a-day 1000000 or --weight 3", EXIT_USAGE)
    with _accounts() as accounts:
        _show_tenant(accounts.change_tenant(name, weight=weight, **limits), as_json)


@contextmanager
def _accounts() -> "Iterator[Accounts]":
    """Open the database; what cannot be done ends the command with its reason."""
    from nightjar.jobs.errors import AccountError
    from nightjar.jobs.store import Store

    settings = read_settings()
    check_driver(settings)
    with closing(Store(settings.database_url.get_secret_value())) as store:
        try:
            yield store.accounts
        except AccountError as error:
            fail(str(error), EXIT_USAGE)


def _limits(**given: str | None) -> dict[str, int | None]:
    """The limits that were given; None for `none`."""
    limits: dict[str, int | None] = {}
    for name, text in given.items():
        if text is None:
            continue
        if text != _ANY and not (text.isascii() and text.isdecimal() and len(text) < 20):
            option = name.replace("_", "-")
            fail(f"--{option} {text!r}: write a whole number, or none for no limit", EXIT_USAGE)
        limits[name] = None if text == _ANY else int(text)
    return limits


def _keep_s(text: str | None) -> dict[str, int | None]:
    """The retention that was given, by its name; None for `none`."""
    if text is None:
        return {}
    return {"keep_results_s": None if text == _ANY else int(parse_span(text).total_seconds())}


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
        payload = {"key": key} | _key_payload(made)
        typer.echo(json.dumps(payload, indent=2, ensure_ascii=False))
    else:
        typer.echo(key)


def _show_tenant(tenant: "Tenant", as_json: bool) -> None:
    payload = _tenant_payload(tenant)
    if as_json:
        typer.echo(json.dumps(payload, indent=2))
    else:
        _table([payload], tuple(payload))


def _key_payload(key: "ApiKey") -> dict[str, Any]:
    return {
        "prefix": key.prefix,
        "tenant": key.tenant,
        "scope": key.scope.value,
        "label": key.label,
        "state": key.state(datetime.now(UTC)).value,
        "created_at": _shown(key.created_at),
        "expires_at": _shown(key.expires_at),
        "revoked_at": _shown(key.revoked_at),
    }


def _tenant_payload(tenant: "Tenant") -> dict[str, Any]:
    from nightjar.jobs.accounts import LIMIT_NAMES

    limits = {name: getattr(tenant.limits, name) for name in LIMIT_NAMES}
    return {"name": tenant.name, "weight": tenant.weight, **limits}


def _shown(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="seconds")


def _table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    """Print rows in columns, with their names above; `-` stands for nothing."""
    texts = [columns, *[tuple(_cell(row[name]) for name in columns) for row in rows]]
    widths = [max(len(line[n]) for line in texts) for n in range(len(columns))]
    for line in texts:
        cells = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


def _cell(value: object) -> str:
    return "-" if value is None or value == "" else str(value)
