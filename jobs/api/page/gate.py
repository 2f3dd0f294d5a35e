"""How browsers get in: by a session that an API key has opened, or freely where no key is needed.

Open to strangers are the sign-in page and the static files. All other pages need a session. The
session stands for its key: a key that is revoked ends it.
"""

from urllib.parse import quote

from fastapi.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.errors import answer_error
from nightjar.jobs.api.key_ring import Found, KeyRing
from nightjar.jobs.api.page import cookies
from nightjar.jobs.api.page.errors import error_page
from nightjar.jobs.errors import JobError
from nightjar.jobs.store.sessions import Sessions

SIGN_IN = f"{cookies.PLACE}/sign-in"
SIGN_OUT = f"{cookies.PLACE}/sign-out"
_OPEN = frozenset({SIGN_IN, SIGN_OUT})
_STATIC = f"{cookies.PLACE}/static/"


class PageGate:
    """Finds the caller of a page by the browser's cookie."""

    def __init__(self, keys: KeyRing, sessions: Sessions) -> None:
        self._keys = keys
        self._sessions = sessions

    def covers(self, scope: Scope) -> bool:
        """Whether it is a page, or a file of one."""
        path = str(scope["path"])
        return path == cookies.PLACE or path.startswith(f"{cookies.PLACE}/")

    async def find(self, scope: Scope) -> Found | None:
        """The caller whose key has opened the session; None where no session is needed.

        Raises RefusedRequestError without a session, and StoreError.
        """
        path = str(scope["path"])
        if path in _OPEN or path.startswith(_STATIC):
            return None
        if not await self._keys.is_needed():
            return await self._keys.find(None)
        token = cookies.token_of(Request(scope))
        session = None
        if token is not None:
            session = await run_in_threadpool(self._sessions.find, cookies.digest(token))
        if session is None:
            raise RefusedRequestError(401, "signed_out", "sign in with an API key")
        found = await self._keys.find_digest(session.key_sha256, session.key_prefix)
        scope.setdefault("state", {})["has_session"] = True
        return found

    async def is_still_in(self, scope: Scope) -> bool:
        """Whether the sender of a request that goes on may still see pages."""
        try:
            await self.find(scope)
        except RefusedRequestError:
            return False
        return True

    def refusal(self, error: JobError, scope: Scope) -> Response:
        """The way to the sign-in page, or a page that says what is wrong."""
        request = Request(scope)
        answer = answer_error(request, error)
        if answer.status_code != 401:
            return error_page(request, error, answer)
        where = scope["path"] + (f"?{request.url.query}" if request.url.query else "")
        place = f"{SIGN_IN}?next={quote(where, safe='')}"
        if request.headers.get("hx-request"):
            answer.headers["HX-Redirect"] = SIGN_IN
            return answer
        if scope["method"] in ("GET", "HEAD"):
            return RedirectResponse(place, 303)
        return RedirectResponse(SIGN_IN, 303)


class ToThePage:
    """Sends a browser that asks for `/` to the page; programs get the API's answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the way to the page, or hand the request on."""
        if scope["type"] == "http" and scope["path"] == "/" and scope["method"] == "GET":
            accepted = Request(scope).headers.get("accept", "")
            if "text/html" in accepted:
                await RedirectResponse(f"{cookies.PLACE}/", 303)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_our_place(path: str) -> bool:
    """Whether a browser may be sent there after sign-in: to a page of ours alone."""
    fits = path == cookies.PLACE or path.startswith(f"{cookies.PLACE}/")
    return fits and "\\" not in path and path.isprintable() and path.isascii()
