"""The page `/docs`: the OpenAPI document as people read it, with files of ours alone."""

from starlette.requests import Request
from starlette.responses import Response

from nightjar.jobs.api.page.rendering import POLICY, fragment, html

# Swagger UI's pictures stand in its stylesheet.
_POLICY = POLICY.replace("img-src 'self'", "img-src 'self' data:")


def show_docs(request: Request) -> Response:
    """The page, for a browser with or without a key: the document says nothing of any job."""
    answer = html(request, fragment("api_docs.html"))
    answer.headers["Content-Security-Policy"] = _POLICY
    return answer
