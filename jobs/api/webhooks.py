"""Webhooks over HTTP: where a tenant's events are sent, and what became of them."""

import threading
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import JSONResponse

from nightjar.jobs.api import examples
from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.caller import Administrator, Reader
from nightjar.jobs.api.documenting import documented
from nightjar.jobs.api.payloads import seconds, seconds_or_none
from nightjar.jobs.api.request_bodies import (
    NewWebhookBody,
    WebhookChange,
    body_documented,
    json_body,
)
from nightjar.jobs.api.results import is_id
from nightjar.jobs.api.schemas import (
    DeletedWebhook,
    DeliveryList,
    DeliveryPayload,
    NewWebhookPayload,
    WebhookList,
    WebhookPayload,
)
from nightjar.jobs.errors import UnknownDeliveryError, UnknownWebhookError
from nightjar.jobs.events import Delivery, NewWebhook, Webhook
from nightjar.jobs.store import Store
from nightjar.jobs.webhooks.addresses import AddressGuard, callable_target
from nightjar.jobs.webhooks.errors import SendingError
from nightjar.jobs.webhooks.signature import new_secret

MAX_PAGE = 100
# Names that are resolved at once: a slow server of names must not hold all threads of the API.
_RESOLVED_AT_ONCE = 4


WebhookId = Annotated[str, Path(description="The id of a webhook.", examples=["wh_019a8f0e6c1b2d"])]
DeliveryId = Annotated[
    str, Path(description="The id of a delivery.", examples=["whd_019a8f0e6c1b2d"])
]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
After = Annotated[str | None, Query(description="The last id of the page before.")]


def making_router(store: Store, guard: AddressGuard) -> APIRouter:
    """Makes webhooks of URLs that `guard` allows."""
    router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])
    resolving = threading.BoundedSemaphore(_RESOLVED_AT_ONCE)

    @router.post(
        "",
        status_code=201,
        response_model=NewWebhookPayload,
        responses=documented(examples.NEW_WEBHOOK, 400, 408, 409, 413, 415, status=201),
        openapi_extra=body_documented(
            NewWebhookBody, {"url": examples.WEBHOOK["url"], "events": examples.WEBHOOK["events"]}
        ),
    )
    def create_webhook(
        caller: Administrator, body: Annotated[NewWebhookBody, Depends(json_body(NewWebhookBody))]
    ) -> JSONResponse:
        """Make a webhook. The answer shows its secret, by which a receiver checks signatures."""
        if not resolving.acquire(blocking=False):
            message = "too many webhooks are being made; send it again in some seconds"
            raise RefusedRequestError(503, "webhooks_busy", message)
        try:
            callable_target(body.url, guard)
        except SendingError as error:
            raise RefusedRequestError(400, "invalid_webhook_url", str(error), "url") from error
        finally:
            resolving.release()
        new = NewWebhook(caller.tenant, body.url, tuple(dict.fromkeys(body.events)), new_secret())
        made: NewWebhookPayload = {
            **webhook_payload(store.webhooks.add(new)),
            "secret": new.secret,
        }
        return JSONResponse(made, status_code=201)

    return router


def webhooks_router(store: Store) -> APIRouter:
    """Lists, shows, switches and deletes webhooks."""
    router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])

    @router.get("", response_model=WebhookList, responses=documented(examples.WEBHOOK_LIST, 400))
    def list_webhooks(caller: Reader, limit: Limit = 20, after: After = None) -> JSONResponse:
        """Webhooks, newest first."""
        found = store.webhooks.newest(caller.tenant, limit + 1, _after(after, "wh_"))
        data = [webhook_payload(one) for one in found[:limit]]
        page: WebhookList = {
            "object": "list",
            "data": data,
            "has_more": len(found) > limit,
            "next_after": data[-1]["id"] if data else None,
        }
        return JSONResponse(page)

    @router.get(
        "/{webhook_id}", response_model=WebhookPayload, responses=documented(examples.WEBHOOK, 404)
    )
    def show_webhook(caller: Reader, webhook_id: WebhookId) -> JSONResponse:
        """One webhook."""
        found = store.webhooks.get(caller.tenant, _webhook_id(webhook_id))
        return JSONResponse(webhook_payload(found))

    @router.post(
        "/{webhook_id}",
        response_model=WebhookPayload,
        responses=documented(examples.WEBHOOK, 400, 404, 408, 413, 415),
        openapi_extra=body_documented(WebhookChange, {"enabled": True}),
    )
    def change_webhook(
        caller: Administrator,
        webhook_id: WebhookId,
        body: Annotated[WebhookChange, Depends(json_body(WebhookChange))],
    ) -> JSONResponse:
        """Switch a webhook on or off. While it is off, no events are kept for it."""
        id_ = _webhook_id(webhook_id)
        changed = store.webhooks.set_enabled(caller.tenant, id_, enabled=body.enabled)
        return JSONResponse(webhook_payload(changed))

    @router.delete(
        "/{webhook_id}",
        response_model=DeletedWebhook,
        responses=documented(examples.DELETED_WEBHOOK, 404),
    )
    def delete_webhook(caller: Administrator, webhook_id: WebhookId) -> JSONResponse:
        """Delete a webhook, with its deliveries."""
        store.webhooks.delete(caller.tenant, _webhook_id(webhook_id))
        gone: DeletedWebhook = {"id": webhook_id, "object": "webhook", "deleted": True}
        return JSONResponse(gone)

    return router


def deliveries_router(store: Store) -> APIRouter:
    """What is sent to webhooks, and what became of it."""
    router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])

    @router.get(
        "/{webhook_id}/deliveries",
        response_model=DeliveryList,
        responses=documented(examples.DELIVERY_LIST, 400, 404),
    )
    def list_deliveries(
        caller: Reader, webhook_id: WebhookId, limit: Limit = 20, after: After = None
    ) -> JSONResponse:
        """Deliveries to a webhook, newest first."""
        own = store.webhooks.get(caller.tenant, _webhook_id(webhook_id))
        found = store.deliveries.newest(own.id, limit + 1, _after(after, "whd_"))
        data = [delivery_payload(one) for one in found[:limit]]
        page: DeliveryList = {
            "object": "list",
            "data": data,
            "has_more": len(found) > limit,
            "next_after": data[-1]["id"] if data else None,
        }
        return JSONResponse(page)

    @router.post(
        "/deliveries/{delivery_id}/redeliver",
        response_model=DeliveryPayload,
        responses=documented(examples.DELIVERY, 404, 409),
    )
    def redeliver(caller: Administrator, delivery_id: DeliveryId) -> JSONResponse:
        """Send an event again, with the same id: now, and with a new budget of attempts."""
        if not is_id(delivery_id):
            raise UnknownDeliveryError(delivery_id[:64])
        return JSONResponse(
            delivery_payload(store.deliveries.redeliver(caller.tenant, delivery_id))
        )

    return router


def webhook_payload(webhook: Webhook) -> WebhookPayload:
    """A webhook, without its secret."""
    return {
        "id": webhook.id,
        "object": "webhook",
        "url": webhook.url,
        "events": list(webhook.events),
        "enabled": webhook.enabled,
        "disabled_reason": webhook.disabled_reason,
        "created_at": seconds(webhook.created_at),
    }


def delivery_payload(delivery: Delivery) -> DeliveryPayload:
    """A delivery, without the body of its event."""
    return {
        "id": delivery.id,
        "object": "webhook.delivery",
        "webhook_id": delivery.webhook_id,
        "event_id": delivery.event_id,
        "type": delivery.type,
        "job_id": delivery.job_id,
        "state": delivery.state,
        "attempts": delivery.attempts,
        "next_at": seconds_or_none(delivery.next_at),
        "last_status": delivery.last_status,
        "last_reason": delivery.last_reason,
        "created_at": seconds(delivery.created_at),
        "attempted_at": seconds_or_none(delivery.attempted_at),
        "ended_at": seconds_or_none(delivery.ended_at),
    }


def _webhook_id(webhook_id: str) -> str:
    if not is_id(webhook_id):
        raise UnknownWebhookError(webhook_id[:64])
    return webhook_id


def _after(after: str | None, prefix: str) -> str | None:
    if after is not None and not (is_id(after) and after.startswith(prefix)):
        message = f"after: is no id of this list, which begin with {prefix}"
        raise RefusedRequestError(400, "invalid_parameter", message, "after")
    return after
