"""Made-up answers, for tests of what lands and not of what is computed."""

from nightjar.jobs.records import ClaimedMicroBatch, MicroBatchRef, NewResult, ResultRecord
from nightjar.jobs.store import Store


def answers(claimed: ClaimedMicroBatch) -> list[NewResult]:
    """A success for each request, whose text tells which request it answers."""
    return [
        NewResult(
            request.id,
            200,
            {"text": f"answer to {request.custom_id}"},
            prompt_tokens=3,
            completion_tokens=2,
            requested_tokens=4,
            saved_tokens=2,
            finish_reason="stop",
        )
        for request in claimed.requests
    ]


def claim(store: Store, ref: MicroBatchRef, owner: str = "worker") -> ClaimedMicroBatch:
    claimed = store.leases.claim(ref.id, ref.epoch, owner, ref.fingerprint)
    assert claimed is not None
    return claimed


def compute(store: Store, ref: MicroBatchRef, owner: str = "worker") -> bool:
    """Claim and finish."""
    claimed = claim(store, ref, owner)
    return store.leases.finish(claimed.id, claimed.epoch, owner, answers(claimed))


def codes(results: list[ResultRecord]) -> list[str | None]:
    """The error code of each result, None for a success."""
    return [None if record.error is None else record.error.code for record in results]
