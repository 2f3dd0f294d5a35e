"""Small jobs in a real store, for tests that begin in the middle of the journey."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import EncodedRequest, MicroBatchRef, NewJob, NewMicroBatch, NewRequest
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store

Body = dict[str, object]


def submit(
    store: Store,
    bodies: list[Body],
    *,
    merge_equal: bool = False,
    priority: int = 0,
    model: str | None = None,
    job_id: str | None = None,
) -> str:
    """A job of these bodies, each computed unless merged; those with a query are rankings.

    model: the model that it names; None for a job that names none.
    job_id: the job's id; None for a new one of today.
    """
    rows = []
    for index, body in enumerate(bodies):
        kind = RequestKind.RANK if "query" in body else RequestKind.GENERATE
        rows.append(NewRequest(index, index + 1, f"row-{index}", kind, validate_body(kind, body)))
    new = NewJob(model or "tiny", merge_equal=merge_equal, priority=priority, id=job_id)
    with store.jobs.submit(replace(new, names_model=model is not None)) as submission:
        submission.add(rows)
    return submission.job_id


def submit_for(store: Store, tenant: str, rows: int, key: str | None = None) -> str:
    """A job of a tenant: equal completions, each of which is computed."""
    body = validate_body(RequestKind.GENERATE, {"prompt": "a", "max_tokens": 4})
    new = NewJob("tiny", key, merge_equal=False, tenant=tenant)
    with store.jobs.submit(new) as submission:
        submission.add(
            NewRequest(n, n + 1, f"row-{n}", RequestKind.GENERATE, body) for n in range(rows)
        )
    return submission.job_id


def planned(
    store: Store,
    requests: int,
    *,
    each: int = 1,
    priority: int = 0,
    job_id: str | None = None,
) -> tuple[str, list[MicroBatchRef]]:
    """A job of completions, planned into micro-batches of `each` requests."""
    bodies: list[Body] = [{"prompt": "a", "max_tokens": 4, "temperature": 0}] * requests
    job_id = submit(store, bodies, priority=priority, job_id=job_id)
    queued = [request.id for request in store.backlog.queued_requests(job_id, requests)]
    groups = [queued[start : start + each] for start in range(0, requests, each)]
    refs = store.planning.save_plan(
        job_id,
        [EncodedRequest(id_, [[1, 2, 3]]) for id_ in queued],
        [NewMicroBatch(RequestKind.GENERATE, 32, group, 7 * len(group)) for group in groups],
        [],
    )
    return job_id, refs


def planned_texts(
    store: Store, texts: list[str], encode: Callable[[str], list[int]], *, each: int
) -> tuple[str, list[MicroBatchRef]]:
    """A job of completions of these prompts, really encoded, `each` in a micro-batch."""
    job_id = submit(store, [{"prompt": text, "max_tokens": 4, "temperature": 0} for text in texts])
    queued = store.backlog.queued_requests(job_id, len(texts))
    encoded = [EncodedRequest(request.id, [encode(request.body["prompt"])]) for request in queued]
    ids = [request.id for request in queued]
    groups = [ids[start : start + each] for start in range(0, len(ids), each)]
    batches = [NewMicroBatch(RequestKind.GENERATE, 32, group, 7 * len(group)) for group in groups]
    return job_id, store.planning.save_plan(job_id, encoded, batches, [])


def before_the_next_write(
    store: Store, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]
) -> None:
    """Let something happen between what is read next and the transaction that rests on it."""
    database, write = store.database, store.database.write

    def later(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(database, "write", write)
        act()
        return write(*arguments, **options)

    monkeypatch.setattr(database, "write", later)
