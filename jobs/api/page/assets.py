"""The static files of the page, read and compressed once, with the hash of all of them in the path.

A browser may keep such a file for ever: a new version has another path.
"""

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from nightjar.jobs.api.page.cookies import PLACE

FOLDER = Path(__file__).with_name("static")
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_FOREVER = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class Asset:
    """A file, and what it is compressed."""

    kind: str
    plain: bytes
    compressed: bytes


@cache
def assets() -> dict[str, Asset]:
    """The files by their paths below the folder."""
    found = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.is_file() and path.suffix in _TYPES:
            content = path.read_bytes()
            packed = gzip.compress(content, 9, mtime=0)
            name = path.relative_to(FOLDER).as_posix()
            found[name] = Asset(_TYPES[path.suffix], content, packed)
    return found


@cache
def version() -> str:
    """A hash of all files."""
    whole = hashlib.sha256()
    for name, asset in assets().items():
        whole.update(name.encode() + b"\0" + asset.plain)
    return whole.hexdigest()[:12]


def asset_url(name: str) -> str:
    """The path of a file on the server; KeyError for one that does not exist."""
    assets()[name]
    return f"{PLACE}/static/{version()}/{name}"


def serve(request: Request, name: str, given: str) -> Response:
    """The file; 404 for one that does not exist. One of another version may not be kept."""
    asset = assets().get(name)
    if asset is None:
        return Response("there is no such file\n", 404, media_type="text/plain")
    headers = {
        "Cache-Control": _FOREVER if given == version() else "no-store",
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
    }
    content = asset.plain
    if "gzip" in request.headers.get("accept-encoding", ""):
        content = asset.compressed
        headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers, media_type=asset.kind)
