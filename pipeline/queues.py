"""Queue names: the one place that says which queues exist.

- `plan`: what wakes the planner (planner workers).
- `<kind>-<bucket>`: micro-batches of one kind whose longest sequence fits the bucket,
  for example `generate-128` (GPU workers).
"""

from nightjar.jobs.records import RequestKind

PLAN_QUEUE = "plan"
SMALLEST_BUCKET = 32
LARGEST_BUCKET = 1 << 20
BUCKETS = tuple(1 << power for power in range(5, 21))


def bucket_for(tokens: int) -> int:
    """The smallest power of two from 32 on that holds `tokens`."""
    return min(LARGEST_BUCKET, max(SMALLEST_BUCKET, 1 << (tokens - 1).bit_length()))


def compute_queue(kind: RequestKind, bucket: int) -> str:
    """Name of the queue that carries micro-batches of `kind` and `bucket`."""
    return f"{kind.value}-{bucket}"


def compute_queues() -> list[str]:
    """Every queue that a GPU worker listens on."""
    return [compute_queue(kind, bucket) for kind in RequestKind for bucket in BUCKETS]
