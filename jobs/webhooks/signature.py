"""Signatures of events by Standard Webhooks (https://www.standardwebhooks.com), version 1.

The tests compare them with the package `standardwebhooks`. It is no dependency: it brings five
packages for what is one line of HMAC.
"""

import base64
import hashlib
import hmac
import secrets

_PREFIX = "whsec_"
_SECRET_BYTES = 32


def new_secret() -> str:
    """A secret that a webhook's events are signed with."""
    return _PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def signed_headers(secret: str, event_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The three headers by which a receiver checks who sends, what, and when."""
    key = base64.b64decode(secret.removeprefix(_PREFIX))
    signed = f"{event_id}.{timestamp}.".encode() + body
    digest = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{digest}",
    }
