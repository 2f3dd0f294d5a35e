"""The requests of the fault tests: row n is the same request in every job."""

import json
from collections.abc import Iterator

from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import NewRequest
from nightjar.jobs.states import RequestKind

MOST_ROWS = 2_000
"""So many are answered in the undisturbed run that other jobs are compared with."""

BULK_ROWS = 15_000
RANK_EVERY = 10


def request_rows(count: int) -> Iterator[NewRequest]:
    """The first `count` rows: completions, and a ranking in every tenth."""
    if not 0 < count <= BULK_ROWS:
        raise ValueError(f"a job of the fault tests has 1 to {BULK_ROWS} rows, not {count}")
    for index in range(count):
        kind, body = _body(index)
        yield NewRequest(index, index + 1, f"row-{index}", kind, validate_body(kind, body))


def batch_file(count: int) -> bytes:
    """The same rows as batch lines, for an upload."""
    lines = []
    for index in range(count):
        kind, body = _body(index)
        url = "/v1/rerank" if kind is RequestKind.RANK else "/v1/completions"
        line = {"custom_id": f"row-{index}", "method": "POST", "url": url, "body": body}
        lines.append(json.dumps(line))
    return "\n".join(lines).encode()


def prompt(index: int) -> str:
    """The text of a completion."""
    return f"row number {index}"


def _body(index: int) -> tuple[RequestKind, dict[str, object]]:
    if index % RANK_EVERY == RANK_EVERY - 1:
        documents = [f" document {part} of {index}" for part in range(2)]
        return RequestKind.RANK, {"query": prompt(index), "documents": documents}
    body = {"prompt": prompt(index), "max_tokens": 4 + index % 5, "temperature": 0}
    return RequestKind.GENERATE, body
