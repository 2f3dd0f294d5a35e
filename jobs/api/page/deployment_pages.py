"""The deployment: GPU workers, queues, and what each tenant has had computed."""

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from nightjar.jobs.api.caller import Caller, Reader
from nightjar.jobs.api.page.rendering import fragment, is_operator, page
from nightjar.jobs.api.page.streams import Streams
from nightjar.jobs.store import Store
from nightjar.jobs.store.shares import TenantShare
from nightjar.jobs.store.waiting import SILENT_AFTER_S

MOST_SHARES = 500


class DeploymentPages:
    """Reads what the pages of the deployment show to a caller."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def workers(self, caller: Caller) -> dict[str, Any]:
        """GPU workers and what they compute; jobs of other tenants have no id here."""
        silent_since = datetime.now(UTC) - timedelta(seconds=SILENT_AFTER_S)
        found = self._store.deployment.workers()
        return {
            "workers": found,
            "silent": {one.owner for one in found if one.seen_at < silent_since},
            "tenant": caller.tenant,
            "is_operator": is_operator(caller),
        }

    def queues(self, _: Caller) -> dict[str, Any]:
        """What waits, by model, kind and bucket."""
        found = self._store.deployment.queues()
        most = max((one.waiting + one.dispatched + one.computing for one in found), default=0)
        return {"queues": found, "most": most}

    def shares(self, caller: Caller) -> dict[str, Any]:
        """Computed tokens of each model by tenant; those of the caller's tenant alone, but for
        whoever runs the deployment."""
        names = {one.fingerprint: one.name for one in self._store.models.known()}
        of_model: dict[str, list[TenantShare]] = defaultdict(list)
        for one in self._store.shares.all()[:MOST_SHARES]:
            if is_operator(caller) or one.tenant == caller.tenant:
                name = names.get(one.fingerprint, one.fingerprint[:12])
                of_model[name].append(one)
        models = [
            {
                "name": name,
                "shares": sorted(found, key=lambda one: -one.computed_tokens),
                "tokens": sum(one.computed_tokens for one in found),
                "weights": sum(one.weight for one in found),
            }
            for name, found in sorted(of_model.items())
        ]
        return {"models": models, "is_operator": is_operator(caller)}


def deployment_router(store: Store, streams: Streams) -> APIRouter:
    """The pages of workers, queues and tenants, each with a live part."""
    router, pages = APIRouter(), DeploymentPages(store)

    @router.get("/workers")
    def workers(request: Request, caller: Reader) -> Response:
        return page(request, "workers.html", **pages.workers(caller))

    @router.get("/workers/events")
    def live_workers(request: Request, caller: Reader) -> Response:
        return streams.answer(
            request,
            lambda: pages.workers(caller),
            lambda seen: fragment("_workers.html", **seen),
        )

    @router.get("/queues")
    def queues(request: Request, caller: Reader) -> Response:
        return page(request, "queues.html", **pages.queues(caller))

    @router.get("/queues/events")
    def live_queues(request: Request, caller: Reader) -> Response:
        return streams.answer(
            request, lambda: pages.queues(caller), lambda seen: fragment("_queues.html", **seen)
        )

    @router.get("/tenants")
    def tenants(request: Request, caller: Reader) -> Response:
        return page(request, "tenants.html", **pages.shares(caller))

    return router
