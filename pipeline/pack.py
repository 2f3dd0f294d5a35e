"""Pack: which encoded requests travel together in one micro-batch.

Requests of one kind whose lengths fall into the same bucket share a micro-batch, so that
little is padded; requests that begin with the same tokens stand next to each other, so that
the engine finds the shared prefix in one place. No micro-batch holds more than its budgets.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nightjar.jobs.records import EncodedRequest, NewMicroBatch, RequestKind
from nightjar.pipeline.queues import bucket_for

# Two requests are kin when this many leading tokens agree: a system prompt, a few-shot
# preamble, the query of several rank requests. Shorter prefixes save too little.
PREFIX_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Packable:
    """An encoded request with what packing needs to know of it."""

    request: EncodedRequest
    kind: RequestKind
    max_tokens: int

    @property
    def length(self) -> int:
        """Tokens of its longest sequence at prefill: prompt, or query with longest document."""
        first, *documents = self.request.segments
        return len(first) + max(map(len, documents), default=0)

    @property
    def cost(self) -> int:
        """Tokens that computing it may touch: prompt and answer, or query and every document."""
        return sum(map(len, self.request.segments)) + self.max_tokens


def pack(
    requests: Sequence[Packable], *, most_requests: int, most_tokens: int
) -> list[NewMicroBatch]:
    """Group requests into micro-batches.

    Args:
        requests: What to pack; kinds may be mixed.
        most_requests: Most requests in one micro-batch.
        most_tokens: Most tokens in one; a request that is larger alone travels alone.

    Returns:
        Micro-batches that hold every request exactly once.
    """
    groups: dict[tuple[RequestKind, int], list[Packable]] = defaultdict(list)
    for request, bucket in _with_buckets(requests):
        groups[request.kind, bucket].append(request)
    batches = []
    for (kind, bucket), members in groups.items():
        members.sort(key=_prefix_order)
        for cut in _cut(members, most_requests, most_tokens):
            batches.append(
                NewMicroBatch(
                    kind=kind,
                    bucket=bucket,
                    request_ids=[member.request.id for member in cut],
                    tokens=sum(member.cost for member in cut),
                )
            )
    return batches


def _with_buckets(requests: Sequence[Packable]) -> Iterator[tuple[Packable, int]]:
    """Pair each request with its bucket; kin take the bucket of their longest."""
    longest: dict[tuple[RequestKind, bytes], int] = defaultdict(int)
    for request in requests:
        key = request.kind, _prefix(request)
        longest[key] = max(longest[key], request.length)
    for request in requests:
        prefix = _prefix(request)
        kin = len(prefix) == PREFIX_TOKENS * array("i").itemsize
        length = longest[request.kind, prefix] if kin else request.length
        yield request, bucket_for(length)


def _prefix(request: Packable) -> bytes:
    return array("i", request.request.segments[0][:PREFIX_TOKENS]).tobytes()


def _prefix_order(request: Packable) -> tuple[bytes, int, int]:
    """Sort key: kin together, then by length, then by arrival."""
    return _prefix(request), request.length, request.request.id


def _cut(
    members: Sequence[Packable], most_requests: int, most_tokens: int
) -> Iterator[list[Packable]]:
    batch: list[Packable] = []
    tokens = 0
    for member in members:
        if batch and (len(batch) == most_requests or tokens + member.cost > most_tokens):
            yield batch
            batch, tokens = [], 0
        batch.append(member)
        tokens += member.cost
    if batch:
        yield batch
