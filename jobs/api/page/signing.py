"""Signing in with an API key, and out again."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Form, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse
from starlette.responses import Response

from nightjar.jobs.accounts import digest_of, is_key, prefix_of
from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.caller import Reader
from nightjar.jobs.api.key_ring import KeyRing
from nightjar.jobs.api.page import cookies
from nightjar.jobs.api.page.gate import SIGN_IN, is_our_place
from nightjar.jobs.api.page.rendering import page
from nightjar.jobs.overview_records import StoredSession
from nightjar.jobs.store.sessions import Sessions

_HOME = f"{cookies.PLACE}/"
_LONGEST = 512


def signing_router(keys: KeyRing, sessions: Sessions) -> APIRouter:
    """The sign-in page; a session is a cookie that stands for the key."""
    router = APIRouter()

    @router.get("/sign-in")
    async def ask(request: Request) -> Response:
        if not await keys.is_needed():
            return RedirectResponse(_HOME, 303)
        return _form(request, request.query_params.get("next", ""))

    @router.post("/sign-in")
    async def sign_in(
        request: Request,
        key: Annotated[str, Form(max_length=_LONGEST)] = "",
        place: Annotated[str, Form(max_length=2_000)] = "",
    ) -> Response:
        key = key.strip()
        try:
            await keys.find(key)
        except RefusedRequestError as error:
            return _form(request, place, str(error), error.status)
        token = cookies.new_token()
        expires_at = datetime.now(UTC) + timedelta(seconds=cookies.SESSION_S)
        prefix = prefix_of(key) if is_key(key) else None
        session = StoredSession(digest_of(key), prefix, expires_at)
        await run_in_threadpool(sessions.begin, cookies.digest(token), session)
        answer = RedirectResponse(place if is_our_place(place) else _HOME, 303)
        cookies.set_cookie(answer, request, token)  # another one than before: nobody has fixed it
        return answer

    @router.post("/sign-out")
    async def sign_out(
        request: Request, token: Annotated[str, Form(max_length=200)] = ""
    ) -> Response:
        held = cookies.token_of(request)
        if held is not None:
            if not cookies.is_form_token(token, held):
                raise RefusedRequestError(403, "foreign_form", "sign out on a page of this browser")
            await run_in_threadpool(sessions.end, cookies.digest(held))
        answer = RedirectResponse(SIGN_IN, 303)
        cookies.drop_cookie(answer)
        return answer

    @router.get("/signed-in")
    async def signed_in(_: Reader) -> Response:
        """204: the browser has a session, also if a link of another site hid its cookie."""
        return Response(status_code=204, headers={"Cache-Control": "no-store"})

    return router


def _form(request: Request, place: str, error: str = "", status: int = 200) -> Response:
    kept = place if is_our_place(place) else ""
    return page(request, "sign_in.html", status, place_after=kept, error=error)
