"""Files and batches in a real store, and the passes that a planner takes over them."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nightjar.jobs.batch_records import Batch, NewBatch
from nightjar.jobs.file_records import NewFile
from nightjar.jobs.model_choice import ConfiguredModels
from nightjar.jobs.records import (
    DEFAULT_TENANT,
    EncodedRequest,
    JobLimits,
    NewMicroBatch,
    RequestError,
)
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.pipeline.planning.finalize import Finalizer
from nightjar.pipeline.planning.ingest import Ingest
from tests.outcomes import compute
from tests.processes import completion_line

Line = dict[str, Any] | str


def lines_of(lines: Iterable[Line]) -> bytes:
    """Batch lines as the bytes of a file; texts go as they are."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return "".join(f"{text}\n" for text in texts).encode()


def completions(count: int) -> list[Line]:
    """Lines of as many completions, no two alike."""
    return [completion_line(f"row-{n}", prompt=f"hello {n}", max_tokens=4) for n in range(count)]


def upload(
    store: Store, data: bytes, *, tenant: str = DEFAULT_TENANT, part_bytes: int = 1 << 20
) -> str:
    """A file of these bytes, in parts."""
    file_id = store.files.begin(NewFile(tenant, "in.jsonl"))
    for number, start in enumerate(range(0, len(data), part_bytes)):
        store.files.append(file_id, number, data[start : start + part_bytes])
    store.files.end(file_id, len(data), hashlib.sha256(data).hexdigest())
    return file_id


def make(
    store: Store,
    data: bytes,
    *,
    tenant: str = DEFAULT_TENANT,
    part_bytes: int = 1 << 20,
    **new: Any,
) -> Batch:
    """A batch over a file of these bytes."""
    file_id = upload(store, data, tenant=tenant, part_bytes=part_bytes)
    return store.batches.create(NewBatch("/v1/completions", file_id, tenant, **new))


def ingest(
    store: Store,
    *,
    limits: JobLimits | None = None,
    attempts: int = 3,
    models: str = "tiny",
    clock: Callable[[], float] = time.monotonic,
) -> Ingest:
    """The pass that reads files, for these models."""
    return Ingest(
        store,
        limits=limits or JobLimits(),
        models=ConfiguredModels(tuple(models.split())),
        attempts=attempts,
        clock=clock,
    )


def read_all(reader: Ingest) -> None:
    """Read until nothing is left."""
    while (pause_s := reader.step().pause_s) is not None:
        time.sleep(pause_s)


def landed(store: Store, lines: list[Line], **new: Any) -> Batch:
    """A batch whose rows are a job."""
    batch = make(store, lines_of(lines), **new)
    read_all(ingest(store))
    return batch


def compute_all(store: Store, batch: Batch, *, refused: int = 0) -> None:
    """Plan and compute the rows that wait; the first `refused` of them are refused."""
    queued = [request.id for request in store.backlog.queued_requests(batch.job_id, 1_000)]
    bad, good = queued[:refused], queued[refused:]
    error = RequestError("context_exceeded", "is too long; shorten it 한", "body.prompt")
    refs = store.planning.save_plan(
        batch.job_id,
        [EncodedRequest(id_, [[1, 2, 3]]) for id_ in good],
        [NewMicroBatch(RequestKind.GENERATE, 32, good, 7 * len(good))] if good else [],
        [(id_, error) for id_ in bad],
    )
    for ref in refs:
        assert compute(store, ref)


def finalize_all(store: Store) -> None:
    """Finalize until nothing is left."""
    finalizer = Finalizer(store)
    while finalizer.step():
        pass


def now(store: Store, batch: Batch) -> Batch:
    """The batch as it stands."""
    return store.batches.get(batch.id, batch.tenant)


def statuses(store: Store, batches: Iterable[Batch]) -> Iterator[str]:
    """What each is called now."""
    return (now(store, batch).status.value for batch in batches)
