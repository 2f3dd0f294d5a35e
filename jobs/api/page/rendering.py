"""Makes pages of templates: escaped, compressed, with headers that let only our own files run."""

import gzip
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from starlette.requests import Request
from starlette.responses import Response

import nightjar
from nightjar.jobs.api.caller import Caller, caller_of
from nightjar.jobs.api.page import cookies, wording
from nightjar.jobs.api.page.assets import asset_url
from nightjar.jobs.records import DEFAULT_TENANT
from nightjar.jobs.states import Scope

TEMPLATES = Path(__file__).with_name("templates")
# No script, style, picture, frame or form but our own; nothing inline; nobody shows it in a frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Vary": "Cookie, Accept-Encoding, HX-Request",
}
_LEAST_COMPRESSED = 1024


@cache
def _templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        auto_reload=False,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = (
        "text",
        "word",
        "cut",
        "number",
        "short",
        "rate",
        "duration",
        "age",
        "until",
        "silence",
    )
    made.filters |= {name: getattr(wording, name) for name in (*names, "moment")}
    made.globals |= {"asset": asset_url, "percent": wording.percent, "place": cookies.PLACE}
    return made


def fragment(name: str, **values: Any) -> str:
    """A part of a page."""
    return _templates().get_template(name).render(**values)


def page(request: Request, name: str, http_status: int = 200, **values: Any) -> Response:
    """A whole page for this browser.

    The page's forms carry a token that fits the browser's cookie. A browser without one gets it.
    """
    token = cookies.token_of(request)
    given = token or cookies.new_token()
    caller = caller_of(request)
    known = {
        "caller": caller,
        "may_act": caller.may(Scope.SUBMIT),
        "is_operator": is_operator(caller),
        "form_token": cookies.form_token(given),
        "version": nightjar.__version__,
        "signed_in": getattr(request.state, "has_session", False),
        "here": request.url.path,
    }
    answer = html(request, fragment(name, **{**known, **values}), http_status)
    if token is None:
        cookies.set_cookie(answer, request, given)
    return answer


def html(request: Request, content: str, status: int = 200) -> Response:
    """An answer of HTML, compressed if the browser takes that."""
    headers, body = dict(HEADERS), content.encode("utf-8", "replace")
    accepts = "gzip" in request.headers.get("accept-encoding", "")
    if accepts and len(body) >= _LEAST_COMPRESSED:
        body = gzip.compress(body, 5, mtime=0)
        headers["Content-Encoding"] = "gzip"
    return Response(body, status, headers=headers, media_type="text/html")


def is_operator(caller: Caller) -> bool:
    """Whether it is whoever runs the deployment: an admin of the tenant `default`."""
    return caller.tenant == DEFAULT_TENANT and caller.may(Scope.ADMIN)
