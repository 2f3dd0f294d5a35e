"""Sends one event to one receiver, once."""

import os
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property

import certifi
import httpcore

import nightjar
from nightjar.jobs.events import Attempt, ClaimedDelivery
from nightjar.jobs.webhooks.addresses import AddressGuard, callable_target
from nightjar.jobs.webhooks.connections import CheckedBackend
from nightjar.jobs.webhooks.errors import SendingError
from nightjar.jobs.webhooks.signature import signed_headers
from nightjar.jobs.webhooks.targets import Target

GONE = 410
_LONGEST_RETRY_AFTER = 64  # characters; a date has 29
_ANSWER_BYTES = 512  # read of an answer's body, so that a short one ends in order
_USER_AGENT = f"Nightjar/{nightjar.__version__}"


def trusted_tls() -> ssl.SSLContext:
    """TLS that trusts the system's certificates and certifi's; those of SSL_CERT_FILE alone if set.

    A container may have no certificates of its own.
    """
    context = ssl.create_default_context()
    if not os.environ.get("SSL_CERT_FILE"):
        context.load_verify_locations(certifi.where())
    return context


class WebhookSender:
    """Sends events to receivers that may be called.

    It follows no redirect, asks no proxy, and keeps nothing of what a receiver answers but its
    status.

    Args:
        guard: Says which addresses may be called.
        timeout_s: Seconds for an attempt after the name is resolved: connection, request, answer.
        tls: Makes the TLS settings, with the certificates that are trusted.
    """

    def __init__(
        self,
        guard: AddressGuard,
        *,
        timeout_s: float = 10.0,
        tls: Callable[[], ssl.SSLContext] = trusted_tls,
    ) -> None:
        self._guard = guard
        self._timeout_s = timeout_s
        self._make_tls = tls

    def send(self, claimed: ClaimedDelivery) -> Attempt:
        """Send the event and wait for the status of the answer. A failure is in the attempt."""
        try:
            target, addresses = callable_target(claimed.url, self._guard)
        except SendingError as error:
            return Attempt(None, str(error))
        body = claimed.body.encode()
        headers = {
            "host": target.authority,
            "user-agent": _USER_AGENT,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **signed_headers(claimed.secret, claimed.event_id, int(time.time()), body),
        }
        backend = CheckedBackend(addresses, time.monotonic() + self._timeout_s)
        try:
            return self._post(backend, target, headers, body)
        except httpcore.TimeoutException:
            return Attempt(None, f"no answer within {self._timeout_s:g} s")
        except httpcore.ConnectError as error:
            return Attempt(None, _why_unconnected(error))
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            return Attempt(None, f"the connection broke: {type(error).__name__}")

    def _post(
        self, backend: CheckedBackend, target: Target, headers: dict[str, str], body: bytes
    ) -> Attempt:
        """What the answer says."""
        url = httpcore.URL(
            scheme=target.scheme.encode(),
            host=target.host.encode(),
            port=target.port,
            target=target.path.encode(),
        )
        connection = httpcore.HTTPConnection(
            url.origin,
            ssl_context=self._tls if target.scheme == "https" else None,
            network_backend=backend,
        )
        sent = [(name.encode(), value.encode()) for name, value in headers.items()]
        with connection, connection.stream("POST", url, headers=sent, content=body) as answer:
            attempt = _judged(answer.status, _header(answer, b"retry-after"))
            _read_a_little(answer)
        return attempt

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return self._make_tls()


def _read_a_little(answer: httpcore.Response) -> None:
    read = 0
    try:
        for piece in answer.iter_stream():
            read += len(piece)
            if read >= _ANSWER_BYTES:
                return
    except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError):
        return  # the status is known, and nothing else counts


def _header(answer: httpcore.Response, wanted: bytes) -> str | None:
    found = (value for name, value in answer.headers if name.lower() == wanted)
    value = next(found, None)
    return None if value is None else value.decode("latin-1")


def _judged(status: int, retry_after: str | None) -> Attempt:
    if 200 <= status < 300:
        return Attempt(status)
    if 300 <= status < 400:
        return Attempt(status, f"answered {status}: a redirect is not followed")
    asked_s = None if retry_after is None else parse_retry_after(retry_after, datetime.now(UTC))
    return Attempt(status, f"answered {status}", asked_s)


def parse_retry_after(text: str, moment: datetime) -> float | None:
    """Seconds from `moment` that a header Retry-After asks for: a number, or a date of HTTP.

    Returns None for anything else, and for what has passed.
    """
    text = text.strip()[:_LONGEST_RETRY_AFTER]
    if text.isascii() and text.isdecimal():
        seconds = float(text)
    else:
        try:
            until = parsedate_to_datetime(text)
        except ValueError:
            return None
        seconds = (until.replace(tzinfo=until.tzinfo or UTC) - moment).total_seconds()
    return seconds if seconds > 0 else None


def _why_unconnected(error: httpcore.ConnectError) -> str:
    """A short reason without an address."""
    cause = error.__cause__ or error.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"TLS: {cause.verify_message}"[:200]
    if isinstance(cause, ssl.SSLError):
        return "TLS: the handshake failed"
    if isinstance(cause, ConnectionRefusedError):
        return "the connection was refused"
    return "no connection"
