"""Commands for webhooks and their deliveries; they work on the database itself."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from nightjar.jobs.events import EventType
from nightjar.jobs.records import DEFAULT_TENANT
from nightjar.pipeline.front.cli.console import AsJson, print_json, read_settings, say
from nightjar.pipeline.front.cli.stored import opened_store, print_table, shown

if TYPE_CHECKING:
    from nightjar.jobs.events import Delivery, Webhook

webhooks = typer.Typer(
    name="webhooks",
    help="Make and list webhooks, and send their events again.",
    no_args_is_help=True,
)

Tenant = Annotated[str, typer.Option(help="Whose webhooks they are.")]
WebhookId = Annotated[str, typer.Argument(metavar="ID", help="Such as wh_019a8f0e6c1b2d.")]
_LISTED = 100
_DELIVERY_COLUMNS = ("id", "type", "job_id", "state", "attempts", "last_status", "last_reason")


@webhooks.command(
    "create",
    epilog="Example: SECRET=$(nightjar webhooks create https://example.org/hook "
    "--event job.completed --event batch.completed)",
)
def create_webhook(
    url: Annotated[str, typer.Argument(help="Where events are sent: https://HOST/PATH.")],
    event: Annotated[
        list[EventType] | None, typer.Option(help="An event to send; again for more. All if none.")
    ] = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Make a webhook, and print its secret, which signs the events: it is shown only now.

    Example: nightjar webhooks create https://shop.example/events --event job.completed
    """
    from nightjar.jobs.events import NewWebhook
    from nightjar.jobs.webhooks.addresses import AddressGuard, callable_target
    from nightjar.jobs.webhooks.signature import new_secret

    settings = read_settings()
    new = NewWebhook(tenant, url, tuple(dict.fromkeys(event or ())), new_secret())
    with opened_store(settings) as store:
        owner = store.accounts.tenant(tenant)
        callable_target(url, AddressGuard(allow_private=settings.webhook_allow_private))
        made = store.webhooks.add(new)
    say(f"{made.id}: events of {owner.name} are sent there; the secret is shown only now")
    if as_json:
        print_json(_webhook(made) | {"secret": new.secret}, as_json=True)
    else:
        typer.echo(new.secret)


@webhooks.command("list", epilog="Example: nightjar webhooks list --tenant owls")
def list_webhooks(tenant: Tenant = DEFAULT_TENANT, as_json: AsJson = False) -> None:
    """List the webhooks of a tenant, without their secrets; no events are all of them.

    Example: nightjar webhooks list --tenant owls
    """
    with opened_store(read_settings()) as store:
        owner = store.accounts.tenant(tenant)
        rows = [_webhook(one) for one in store.webhooks.newest(owner.name, _LISTED)]
    if as_json:
        print_json(rows, as_json=True)
    else:
        print_table(rows, ("id", "url", "events", "enabled", "disabled_reason", "created_at"))


@webhooks.command("enable", epilog="Example: nightjar webhooks enable wh_019a8f0e6c1b2d")
def enable_webhook(
    webhook_id: WebhookId, tenant: Tenant = DEFAULT_TENANT, as_json: AsJson = False
) -> None:
    """Switch a webhook on again; the events that came meanwhile were not kept.

    Example: nightjar webhooks enable wh_019a8f
    """
    _switch(webhook_id, tenant, as_json, enabled=True)


@webhooks.command("disable", epilog="Example: nightjar webhooks disable wh_019a8f0e6c1b2d")
def disable_webhook(
    webhook_id: WebhookId, tenant: Tenant = DEFAULT_TENANT, as_json: AsJson = False
) -> None:
    """Switch a webhook off: no events are kept for it until it is on again.

    Example: nightjar webhooks disable wh_019a8f
    """
    _switch(webhook_id, tenant, as_json, enabled=False)


@webhooks.command("delete", epilog="Example: nightjar webhooks delete wh_019a8f0e6c1b2d")
def delete_webhook(
    webhook_id: WebhookId, tenant: Tenant = DEFAULT_TENANT, as_json: AsJson = False
) -> None:
    """Delete a webhook, with its deliveries.

    Example: nightjar webhooks delete wh_019a8f
    """
    with opened_store(read_settings()) as store:
        store.webhooks.delete(tenant, webhook_id)
    if as_json:
        print_json({"id": webhook_id, "deleted": True}, as_json=True)
    else:
        typer.echo(f"{webhook_id} is deleted")


@webhooks.command("deliveries", epilog="Example: nightjar webhooks deliveries wh_019a8f0e6c1b2d")
def list_deliveries(
    webhook_id: WebhookId,
    tenant: Tenant = DEFAULT_TENANT,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="How many, newest first.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List what was sent to a webhook, and what came of the last attempt.

    Example: nightjar webhooks deliveries wh_019a8f
    """
    with opened_store(read_settings()) as store:
        own = store.webhooks.get(tenant, webhook_id)
        rows = [_delivery(one) for one in store.deliveries.newest(own.id, limit)]
    if as_json:
        print_json(rows, as_json=True)
    else:
        print_table(rows, _DELIVERY_COLUMNS)


@webhooks.command("redeliver", epilog="Example: nightjar webhooks redeliver whd_019a8f0e6c1b2d")
def redeliver(
    delivery_id: Annotated[
        str, typer.Argument(metavar="DELIVERY", help="Such as whd_019a8f0e6c1b2d.")
    ],
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Send an event again, with the same id: the leading planner does so within seconds.

    Example: nightjar webhooks redeliver whd_019a8f
    """
    with opened_store(read_settings()) as store:
        found = store.deliveries.redeliver(tenant, delivery_id)
    if as_json:
        print_json(_delivery(found), as_json=True)
    else:
        typer.echo(f"{found.id} is sent again")


def _switch(webhook_id: str, tenant: str, as_json: bool, *, enabled: bool) -> None:
    with opened_store(read_settings()) as store:
        changed = store.webhooks.set_enabled(tenant, webhook_id, enabled=enabled)
    if as_json:
        print_json(_webhook(changed), as_json=True)
    else:
        typer.echo(f"{changed.id} is switched {'on' if enabled else 'off'}")


def _webhook(webhook: "Webhook") -> dict[str, Any]:
    return {
        "id": webhook.id,
        "url": webhook.url,
        "events": [kind.value for kind in webhook.events],
        "enabled": webhook.enabled,
        "disabled_reason": webhook.disabled_reason,
        "created_at": shown(webhook.created_at),
    }


def _delivery(delivery: "Delivery") -> dict[str, Any]:
    return {
        "id": delivery.id,
        "webhook_id": delivery.webhook_id,
        "event_id": delivery.event_id,
        "type": delivery.type.value,
        "job_id": delivery.job_id,
        "state": delivery.state.value,
        "attempts": delivery.attempts,
        "last_status": delivery.last_status,
        "last_reason": delivery.last_reason,
        "next_at": shown(delivery.next_at),
        "created_at": shown(delivery.created_at),
        "attempted_at": shown(delivery.attempted_at),
        "ended_at": shown(delivery.ended_at),
    }
