"""Reads a small JSON object of a model directory."""

import json
from pathlib import Path
from typing import Any

from nightjar.checkpoints.errors import CheckpointError

MAX_JSON_BYTES = 512 << 20
"""The size limit: no configuration, index or tokenizer is larger."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; CheckpointError names the file where there is none."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes are too many for this file; restore it")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); restore the file") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
