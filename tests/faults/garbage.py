"""Bytes that are no task messages."""

import pickle

from nightjar.pipeline.queue.celery_app import COMPUTE_TASK

RAW = [
    b"not JSON",
    b"\xff\xfe\x00",
    b"",
    b"[]",
    b"{}",
    b"null",
    b'"text"',
    b"[" * 5_000,
    b'{"body": 1, "headers": [], "properties": null}',
    b'{"body": "W10=", "headers": {"task": ["nightjar.compute"], "id": {}}, "properties": {}}',
    pickle.dumps({"task": COMPUTE_TASK}),
]
