"""Signatures of messages: only processes that have the key may send work.

A signature covers the body and every header and property, also the queue's name and the delivery
tag. It does not cover itself and the mark that kombu puts on redelivered messages. A message that
was recorded and is sent again has a valid signature. Leases make that harmless, and remote control
only answers questions.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from nightjar.pipeline.queue.message_fields import SIGNATURE
from nightjar.pipeline.queue.message_shape import MessageError

_REDELIVERED = "redelivered"


class Signer:
    """Signs messages and checks signatures. Its `repr` does not show the key.

    Args:
        key: The deployment's secret; all its processes have the same.
    """

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def sign(self, message: dict[str, Any]) -> None:
        """Put the signature into the message's headers."""
        message["headers"][SIGNATURE] = self._signature(message)

    def check(self, message: Mapping[str, Any]) -> None:
        """Raise MessageError unless the message, whose shape is right, was signed with the key."""
        signature = message["headers"].get(SIGNATURE)
        if signature is None:
            raise MessageError("it is not signed; is NIGHTJAR_MESSAGE_KEY set where it was sent?")
        if not hmac.compare_digest(signature, self._signature(message)):
            raise MessageError(
                "its signature is wrong; give all processes the same NIGHTJAR_MESSAGE_KEY"
            )

    def _signature(self, message: Mapping[str, Any]) -> str:
        headers, properties = message["headers"], message["properties"]
        info = _without(properties["delivery_info"], _REDELIVERED)
        signed = {
            **message,
            "headers": _without(headers, SIGNATURE, _REDELIVERED),
            "properties": {**properties, "delivery_info": info},
        }
        text = json.dumps(signed, sort_keys=True, separators=(",", ":"))
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


def _without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}
