"""Queue names: the one place that says which queues exist.

- `plan`: what wakes the planner (planner workers).
- `<model>-<kind>-<bucket>`: micro-batches for one model, of one kind, whose longest sequence fits
  the bucket, for example `3f2a9c0d1b7e-generate-128` (the GPU workers of that model). `<model>` is
  the beginning of the model's fingerprint; the claim compares the whole of it.
- `<kind>-<bucket>`: what a version before this one has planned, without naming the model. Nobody
  of this version listens; the planner plans such work anew.
"""

from nightjar.jobs.records import RequestKind

PLAN_QUEUE = "plan"
SMALLEST_BUCKET = 32
LARGEST_BUCKET = 1 << 20
BUCKETS = tuple(1 << power for power in range(5, 21))
MODEL_DIGITS = 12
"""So many hexadecimal digits of a fingerprint stand in a queue's name."""


def bucket_for(tokens: int) -> int:
    """The smallest power of two from 32 on that holds `tokens`."""
    return min(LARGEST_BUCKET, max(SMALLEST_BUCKET, 1 << (tokens - 1).bit_length()))


def short_model(fingerprint: str) -> str:
    """What stands for a model in the names of its queues, and in logs."""
    return fingerprint[:MODEL_DIGITS]


def compute_queue(fingerprint: str, kind: RequestKind, bucket: int) -> str:
    """Name of the queue that carries micro-batches for a model, of `kind` and `bucket`."""
    model = f"{short_model(fingerprint)}-" if fingerprint else ""
    return f"{model}{kind.value}-{bucket}"


def compute_queues(fingerprint: str) -> list[str]:
    """Every queue that a GPU worker of this model listens on."""
    return [compute_queue(fingerprint, kind, bucket) for kind in RequestKind for bucket in BUCKETS]
