"""Jobs that are planned for a model of made-up fingerprint."""

from nightjar.jobs.records import EncodedRequest, MicroBatchRef, NewMicroBatch
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store

ALPHA, BETA, GAMMA = "a" * 64, "b" * 64, "c" * 64
MANY = 100


def plan(store: Store, job_id: str, fingerprint: str, *, each: int = 1) -> list[MicroBatchRef]:
    """Plan what is queued of a job for a model."""
    ids = [request.id for request in store.backlog.queued_requests(job_id, MANY)]
    groups = [ids[start : start + each] for start in range(0, len(ids), each)]
    return store.planning.save_plan(
        job_id,
        [EncodedRequest(id_, [[1, 2, 3]]) for id_ in ids],
        [NewMicroBatch(RequestKind.GENERATE, 32, group, 3) for group in groups],
        fingerprint=fingerprint,
    )
