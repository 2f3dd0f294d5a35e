"""Queue names: this module defines all queues that exist.

- `plan`: messages that wake the planner. Planner workers listen.
- `<model>-<kind>-<bucket>`, for example `3f2a9c0d1b7e-generate-128`: micro-batches of one kind for
  one model, whose longest sequence fits the bucket. The GPU workers of that model listen. `<model>`
  is the beginning of the model's fingerprint; the claim compares the whole fingerprint.
- `<model>-live`: single calls for one model. The GPU workers of that model have threads for them.
- `<kind>-<bucket>`: micro-batches of an earlier version, which named no model. No process of this
  version listens; the planner plans such work again.
"""

from nightjar.jobs.states import RequestKind

PLAN_QUEUE = "plan"
SMALLEST_BUCKET = 32
LARGEST_BUCKET = 1 << 20
BUCKETS = tuple(1 << power for power in range(5, 21))
MODEL_DIGITS = 12
"""How many hexadecimal digits of the fingerprint a queue's name holds."""


def bucket_for(tokens: int) -> int:
    """The smallest power of two from 32 on that holds `tokens`."""
    return min(LARGEST_BUCKET, max(SMALLEST_BUCKET, 1 << (tokens - 1).bit_length()))


def short_model(fingerprint: str) -> str:
    """The short form of a fingerprint, in queue names and logs."""
    return fingerprint[:MODEL_DIGITS]


def compute_queue(fingerprint: str, kind: RequestKind, bucket: int) -> str:
    """Name of the queue that carries micro-batches for a model, of `kind` and `bucket`."""
    model = f"{short_model(fingerprint)}-" if fingerprint else ""
    return f"{model}{kind.value}-{bucket}"


def live_queue(fingerprint: str) -> str:
    """Name of the queue that carries single calls for a model."""
    return f"{short_model(fingerprint)}-live"


def compute_queues(fingerprint: str) -> list[str]:
    """All queues with micro-batches of jobs that a GPU worker of this model listens on."""
    return [compute_queue(fingerprint, kind, bucket) for kind in RequestKind for bucket in BUCKETS]
