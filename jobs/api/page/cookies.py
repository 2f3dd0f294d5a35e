"""The cookie of a browser, and the tokens of its forms that are bound to it.

A form carries a fresh random number and its keyed digest. Only a page that was made for the same
cookie knows such a pair. It is another pair on each page, so that compressed pages tell nothing of
the cookie.
"""

import hashlib
import hmac
import secrets

from starlette.requests import HTTPConnection
from starlette.responses import Response

COOKIE = "nightjar_session"
PLACE = "/ui"
SESSION_S = 12 * 3600
_TOKEN_LENGTH = 43  # of 32 random bytes in base64
_NONCE_BYTES = 12


def new_token() -> str:
    """What the cookie of a new session holds."""
    return secrets.token_urlsafe(32)


def token_of(connection: HTTPConnection) -> str | None:
    """What the browser's cookie holds; None without one, or for what cannot be ours."""
    token = connection.cookies.get(COOKIE, "")
    return token if len(token) == _TOKEN_LENGTH and token.isascii() else None


def digest(token: str) -> str:
    """What is stored of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def set_cookie(answer: Response, connection: HTTPConnection, token: str) -> None:
    """Give the browser its token, which no script and no other site can use."""
    answer.set_cookie(
        COOKIE,
        token,
        max_age=SESSION_S,
        path=PLACE,
        secure=connection.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )


def drop_cookie(answer: Response) -> None:
    """Take the token away from the browser."""
    answer.delete_cookie(COOKIE, path=PLACE, httponly=True, samesite="strict")


def form_token(token: str) -> str:
    """A token for a form on a page that is made for this cookie."""
    nonce = secrets.token_hex(_NONCE_BYTES)
    return f"{nonce}.{_signed(token, nonce)}"


def is_form_token(given: str, token: str | None) -> bool:
    """Whether a form comes from a page that was made for this cookie."""
    nonce, _, signature = given.partition(".")
    if token is None or not given.isascii():
        return False
    return hmac.compare_digest(signature, _signed(token, nonce))


def _signed(token: str, nonce: str) -> str:
    return hmac.new(token.encode(), f"form {nonce}".encode(), hashlib.sha256).hexdigest()
