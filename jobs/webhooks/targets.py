"""The URL of a webhook, taken apart once: what was checked is what is called."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from nightjar.jobs.webhooks.errors import UnusableUrlError

LONGEST_URL = 2_048
_PORTS = {"https": 443, "http": 80}
_FIRST_FREE_PORT = 1_024
_VISIBLE = re.compile(r"[!-\[\]-~]+")  # ASCII without blanks, controls and the backslash
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_.])?")
_IPV6 = re.compile(r"[0-9a-f:.]+")


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send: `path` has the query with it."""

    scheme: str
    host: str  # a name or an address, in small letters, without brackets
    port: int
    path: str

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def parse_target(url: str, *, allow_http: bool) -> Target:
    """Take the URL of a webhook apart; raises UnusableUrlError."""
    if len(url) > LONGEST_URL:
        raise UnusableUrlError(f"the URL has at most {LONGEST_URL} characters")
    if _VISIBLE.fullmatch(url) is None:
        raise UnusableUrlError(
            "the URL has printable ASCII characters only; write others as %XX, and an "
            "international name in its form xn--"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UnusableUrlError("this is no URL; write https://HOST/PATH") from error
    if parts.scheme not in (("https", "http") if allow_http else ("https",)):
        hint = "" if allow_http else "; http needs NIGHTJAR_WEBHOOK_ALLOW_PRIVATE"
        raise UnusableUrlError(f"the URL begins with https://{hint}")
    if "@" in parts.netloc:
        raise UnusableUrlError("the URL holds no user and no password; the signature proves who")
    if "#" in url:
        raise UnusableUrlError("the URL has no fragment (#)")
    port = _PORTS[parts.scheme] if port is None else port
    if port not in _PORTS.values() and port < _FIRST_FREE_PORT:
        raise UnusableUrlError(f"the port is 443, 80 or one from {_FIRST_FREE_PORT} on")
    query = f"?{parts.query}" if parts.query else ""
    return Target(
        parts.scheme, _checked_host(parts.hostname or ""), port, (parts.path or "/") + query
    )


def _checked_host(host: str) -> str:
    pattern = _IPV6 if ":" in host else _NAME
    if pattern.fullmatch(host) is None:
        raise UnusableUrlError("the URL names no usable host; write https://HOST/PATH")
    return host
