"""Messages that Nightjar did not send: a good one with something wrong, or no message at all.

Celery 5.7 ends, or stops taking, by several of them; the others must stay harmless.
"""

import base64
import bz2
import copy
import json
import pickle
import uuid
import zlib
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]


def encoded(body: object) -> str:
    """A body as it stands in a message."""
    return base64.b64encode(json.dumps(body).encode()).decode()


def good_message(queue: str, task: str, **kwargs: object) -> Message:
    """What Celery sends for a task; unsigned."""
    task_id = str(uuid.uuid4())
    options = dict.fromkeys(("callbacks", "errbacks", "chain", "chord"))
    return {
        "body": encoded([[], kwargs, options]),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {
            "lang": "py",
            "task": task,
            "id": task_id,
            "shadow": None,
            "eta": None,
            "expires": None,
            "group": None,
            "group_index": None,
            "retries": 0,
            "timelimit": [None, None],
            "root_id": task_id,
            "parent_id": None,
            "argsrepr": "()",
            "kwargsrepr": "{}",
            "origin": "gen1@host",
            "ignore_result": None,
            "replaced_task_nesting": 0,
            "stamped_headers": None,
            "stamps": {},
        },
        "properties": {
            "correlation_id": task_id,
            "reply_to": str(uuid.uuid4()),
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": str(uuid.uuid4()),
        },
    }


RAW: dict[str, bytes] = {
    "no JSON": b"not JSON",
    "no UTF-8": b"\xff\xfe\x00",
    "empty": b"",
    "a list": b"[]",
    "an empty object": b"{}",
    "null": b"null",
    "a text": b'"text"',
    "a number": b"7",
    "a number of 5,000 digits": b'{"body": ' + b"9" * 5_000 + b"}",
    "nested 5,000 deep": b"[" * 5_000,
    "other types": b'{"body": 1, "headers": [], "properties": null}',
    "a pickle": pickle.dumps({"task": "nightjar.compute"}),
    "a megabyte": b'{"body": "' + b"x" * 1_000_000 + b'"}',
}

_DEEP: Any = []
for _ in range(200):
    _DEEP = [_DEEP]
# Field by field, by its path.
FIELDS: list[tuple[str, object]] = [
    ("body", None),
    ("body", 5),
    ("body", {"args": []}),
    ("body", "no base64!"),
    ("body", base64.b64encode(b"\xff").decode()),
    ("body", base64.b64encode(b"[" * 5_000).decode()),
    ("body", encoded({})),
    ("body", encoded({"args": 5, "kwargs": 5})),
    ("body", encoded({"task": "nightjar.tick", "id": "1", "args": [], "kwargs": {}})),
    ("body", encoded([5, 5, 5])),
    ("body", encoded([[], {}])),
    ("body", encoded([[], {}, None])),
    ("body", encoded([[], {}, {"callbacks": 5}])),
    ("body", encoded([[], {}, {"callbacks": [{"task": 5}]}])),
    ("body", encoded([[], {}, {"errbacks": ["x"]}])),
    ("body", encoded([[], {}, {"chain": [5]}])),
    ("body", encoded([[], {}, {"chord": {"task": 5}}])),
    ("body", encoded([[], {"epoch": _DEEP}, {}])),
    ("body", encoded([[], {"epoch": float("nan")}, {}])),
    ("body", encoded([list(range(500)), {}, {}])),
    ("content-type", {}),
    ("content-type", "application/x-python-serialize"),
    ("content-type", "application/x-yaml"),
    ("content-type", None),
    ("content-encoding", {}),
    ("content-encoding", "utf-99"),
    ("content-encoding", "binary"),
    ("headers", None),
    ("headers", []),
    ("headers.task", None),
    ("headers.task", ["nightjar.tick"]),
    ("headers.task", {}),
    ("headers.task", "celery.map"),
    ("headers.task", "x" * 10_000),
    ("headers.id", None),
    ("headers.id", {}),
    ("headers.id", "two\nlines"),
    ("headers.id", "\ud800"),
    ("headers.shadow", {}),
    ("headers.shadow", ["x"]),
    ("headers.shadow", 5),
    ("headers.timelimit", 5),
    ("headers.timelimit", [1]),
    ("headers.timelimit", ["a", "b"]),
    ("headers.timelimit", {"soft": 1}),
    ("headers.eta", 5),
    ("headers.eta", "tomorrow"),
    ("headers.eta", "9999-12-31T23:59:59+00:00"),
    ("headers.expires", 5),
    ("headers.expires", {}),
    ("headers.expires", "never"),
    ("headers.expires", "0001-01-01T00:00:00+14:00"),
    ("headers.retries", "many"),
    ("headers.retries", None),
    ("headers.group", {}),
    ("headers.root_id", {}),
    ("headers.parent_id", [1]),
    ("headers.argsrepr", {}),
    ("headers.kwargsrepr", "x" * 10_000),
    ("headers.origin", {}),
    ("headers.ignore_result", "no"),
    ("headers.replaced_task_nesting", "x"),
    ("headers.stamped_headers", 5),
    ("headers.stamps", [5]),
    ("headers.compression", "zlib"),
    ("headers.compression", {}),
    ("headers.redelivered", {}),
    ("headers.nightjar_signature", {}),
    ("headers.delivery_info", 5),
    ("headers.chord", 5),
    ("properties", None),
    ("properties.correlation_id", {}),
    ("properties.reply_to", {}),
    ("properties.delivery_mode", "x"),
    ("properties.delivery_info", None),
    ("properties.delivery_info", []),
    ("properties.delivery_info.exchange", {}),
    ("properties.delivery_info.routing_key", {}),
    ("properties.delivery_info.routing_key", "another-queue"),
    ("properties.delivery_info.consumer_tag", {}),
    ("properties.priority", {}),
    ("properties.priority", 1e300),
    ("properties.body_encoding", {}),
    ("properties.body_encoding", "rot13"),
    ("properties.body_encoding", None),
    ("properties.delivery_tag", {}),
    ("properties.delivery_tag", 5),
    ("properties.delivery_tag", None),
    ("extra", {"__type__": "datetime", "__value__": 5}),
]


def _with(path: str, value: object) -> Callable[[Message], None]:
    def change(message: Message) -> None:
        *folders, name = path.split(".")
        place = message
        for folder in folders:
            place = place[folder]
        place[name] = value

    return change


def _packed(algorithm: str, pack: Callable[[bytes], bytes]) -> Callable[[Message], None]:
    def change(message: Message) -> None:
        message["headers"]["compression"] = algorithm
        message["body"] = base64.b64encode(pack(bytes(32 << 20))).decode()

    return change


def _without(path: str) -> Callable[[Message], None]:
    def change(message: Message) -> None:
        *folders, name = path.split(".")
        place = message
        for folder in folders:
            place = place[folder]
        del place[name]

    return change


_REQUIRED = (
    "body",
    "content-type",
    "headers.id",
    "headers.task",
    "properties.delivery_info",
    "properties.delivery_info.exchange",
    "properties.delivery_tag",
)
CHANGES: dict[str, Callable[[Message], None]] = {
    **{f"{path} = {str(value)[:24]!r}": _with(path, value) for path, value in FIELDS},
    **{f"without {path}": _without(path) for path in _REQUIRED},
    "32 MiB of zeros as zlib": _packed("application/x-gzip", zlib.compress),
    "32 MiB of zeros as bzip2": _packed("application/x-bz2", bz2.compress),
}


def foreign_messages(queue: str, task: str) -> dict[str, bytes]:
    """All of them by what is wrong, as they lie in the broker."""
    found = dict(RAW)
    for name, change in CHANGES.items():
        message = copy.deepcopy(good_message(queue, task))
        change(message)
        found[name] = json.dumps(message).encode()
    return found
