"""What the OpenAPI document says of an upload, whose body and parameters are read by hand.

A body of a gigabyte is parsed while it arrives, so FastAPI must not read it.
"""

from typing import Any

from nightjar.jobs.api import examples
from nightjar.jobs.api.parameters import (
    MAX_METADATA_PAIRS,
    MAX_PRIORITY,
)

_LINES = {
    "schema": {
        "type": "string",
        "description": "One JSON object a line: `custom_id`, `method`, `url` and `body`.",
    },
    "example": examples.UPLOAD,
}


def _parameter(where: str, name: str, description: str, **schema: Any) -> dict[str, Any]:
    return {
        "in": where,
        "name": name,
        "required": False,
        "description": description,
        "schema": {"type": "string", **schema},
    }


IDEMPOTENCY_KEY = _parameter(
    "header",
    "Idempotency-Key",
    "The same content that is sent again with the same key makes nothing new.",
    minLength=1,
    maxLength=255,
)
_BODY = {
    "required": True,
    "description": "Batch lines, as in OpenAI's batch files.",
    "content": {"application/jsonl": _LINES, "text/plain": _LINES},
}
OPENING: dict[str, Any] = {
    "parameters": [
        _parameter(
            "query",
            "model",
            "The model of the job; by default the one that is served.",
            maxLength=512,
        ),
        _parameter(
            "query",
            "metadata",
            f"A JSON object of at most {MAX_METADATA_PAIRS} texts.",
            examples=['{"team":"search"}'],
        ),
        _parameter(
            "query",
            "completion_window",
            "What is not computed by then expires, such as `24h`; units are s, m, h and d.",
            pattern="^[0-9]{1,9}[smhd]$",
        ),
        _parameter(
            "query",
            "keep_results",
            "Its requests and results are purged so long after its end, such as `7d`; sooner where "
            "the deployment keeps less.",
            pattern="^[0-9]{1,9}[smhd]$",
        ),
        _parameter(
            "query",
            "priority",
            "Jobs of a higher priority go first.",
            type="integer",
            minimum=0,
            maximum=MAX_PRIORITY,
        ),
        _parameter(
            "query",
            "wait_for_model",
            "With `true`, a job for an unknown model is stored and waits for it.",
            enum=["true", "false"],
        ),
        IDEMPOTENCY_KEY,
    ],
}
UPLOAD: dict[str, Any] = {"requestBody": _BODY, **OPENING}
PART: dict[str, Any] = {"requestBody": _BODY}
