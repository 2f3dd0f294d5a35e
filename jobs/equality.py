"""When two requests are equal: when the engine is asked the same, so that it answers the same.

A request that draws its tokens is asked with its seed. Without a seed of its own it has the one
that derives from its custom_id, so that no two of one job are merged; greedy requests and beams
draw nothing, and their seeds do not count.
"""

import hashlib

from nightjar.jobs.records import JsonObject

_DIGEST_BYTES = 16
_DRAWN_WITHOUT_WORD = 1.0  # the temperature of a body that gives none


def draws(body: JsonObject) -> bool:
    """Whether the answer depends on the request's seed."""
    return "query" not in body and body.get("temperature", _DRAWN_WITHOUT_WORD) > 0


def derived_seed(custom_id: str) -> int:
    """Seed of a request that names none: of its identity, so that recomputing gives the same."""
    digest = hashlib.sha256(custom_id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8]) >> 1


def asked_without_seed(body: JsonObject) -> JsonObject | None:
    """The body as far as it decides the answer, the same for equal requests of one job.

    None: it draws with a seed that no other request of its job has.
    """
    if body.get("content_key") is not None:
        body = body | {"content_key": None}
    if draws(body):
        return None if body.get("seed") is None else body
    return body if body.get("seed") is None else body | {"seed": None}


def with_own_content_key(body: JsonObject, tenant: str) -> JsonObject:
    """The body as it is stored: nobody can name the content key of another tenant.

    Else a tenant who guesses a key would be given another's answers, or give its own.
    """
    key = body.get("content_key")
    if key is None:
        return body
    own = hashlib.blake2b(f"{tenant}\n{key}".encode(), digest_size=_DIGEST_BYTES)
    return body | {"content_key": own.hexdigest()}


def digest(text: str) -> bytes:
    """What stands for a normalised body, 16 bytes."""
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
