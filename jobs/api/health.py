"""What the API knows of the deployment around it."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

import nightjar
from nightjar.jobs.api import examples
from nightjar.jobs.api.documenting import example_content
from nightjar.jobs.api.forwarding import UploadTaker
from nightjar.jobs.api.schemas import Health
from nightjar.jobs.errors import StoreError, StoreUnavailableError
from nightjar.jobs.store import Store

logger = logging.getLogger(__name__)

UNREACHABLE = "the database is not available; the API's log says why"
REFUSED = "the database refused a statement; the API's log says why"
NO_TABLES = "the database lacks Nightjar's tables; run `nightjar migrate`"
NOT_SERVED = "no GPU worker serves it; start `nightjar worker compute` with it"
OK = "ok"
UNKNOWN = "unknown"
UNAVAILABLE = "unavailable"


class Deployment(Protocol):
    """The other processes, as the API sees them."""

    def parts(self) -> Mapping[str, str]:
        """`broker`, `planner`, `beat`, `gpu_workers`, and `task_runners` where tasks are scheduled.

        Each is OK, UNKNOWN, or what is wrong with it.
        """


def public_message(error: StoreError) -> str:
    """What a stranger may read of an error: without the address and the words of the database."""
    if "nightjar migrate" in str(error):
        return NO_TABLES
    return UNREACHABLE if isinstance(error, StoreUnavailableError) else REFUSED


def health_router(
    store: Store,
    taker: UploadTaker | None,
    deployment: Deployment | None,
    may_read: Callable[[Request, bool], Awaitable[bool]],
) -> APIRouter:
    """`GET /health`; `may_read` says who is told more than the states of the parts.

    Its flag is whether the store answers.
    """
    router = APIRouter(tags=["deployment"])

    @router.get(
        "/health",
        response_model=Health,
        openapi_extra={"security": [{}, {"key": []}]},
        responses={
            200: {"content": example_content(examples.HEALTH)},
            503: {
                "model": Health,
                "description": "No jobs are taken; `message` says why.",
                "content": example_content(examples.NO_HEALTH),
            },
        },
    )
    async def health(request: Request) -> JSONResponse:
        """200 while the database answers and uploads are taken; else 503, and why in `message`.

        `parts` says it of each part of the deployment, `models` of each model. A broker, planner,
        beat, GPU worker or task runner that is not there is no reason for a 503: the API takes
        jobs, which wait in SQL. An upload process that ended once is started again, and is no
        reason for a 503 either.

        Where keys are in use, only a key of any scope is told names and reasons. All others read
        `ok`, `unknown` or `unavailable` of each part.
        """
        body = await run_in_threadpool(_look, store, taker, deployment)
        status = 200 if body["status"] == OK else 503
        if not await may_read(request, body["parts"]["database"] == OK):
            body = _for_strangers(body)
        return JSONResponse(body, status_code=status)

    return router


def _look(store: Store, taker: UploadTaker | None, deployment: Deployment | None) -> Health:
    parts: dict[str, str] = {"database": OK, "uploads": OK}
    models: dict[str, str] = {}
    try:
        store.ping()
        models = {one.name: OK if one.is_served else NOT_SERVED for one in store.models.known()}
        if deployment is not None:
            parts |= deployment.parts()
    except StoreError as error:
        logger.warning("database unreachable: %s", error, extra={"action": "health_failed"})
        parts["database"] = public_message(error)
    if taker is not None and (trouble := taker.trouble()):
        logger.warning("uploads are not taken", extra={"action": "health_failed"})
        parts["uploads"] = trouble
    troubles = [parts[name] for name in ("database", "uploads") if parts[name] != OK]
    body: Health = {
        "status": "ok",
        "version": nightjar.__version__,
        "parts": parts,
        "models": models,
    }
    if troubles:
        body |= {"status": "unavailable", "message": "; ".join(troubles)}
    return body


def _for_strangers(body: Health) -> Health:
    """The states alone: no name of a model, and no reason."""
    parts = {
        name: said if said in (OK, UNKNOWN) else UNAVAILABLE for name, said in body["parts"].items()
    }
    return {"status": body["status"], "version": body["version"], "parts": parts}
