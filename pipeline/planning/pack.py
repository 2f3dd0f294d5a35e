"""Pack: group encoded requests into micro-batches.

Requests of one kind whose lengths fall into the same bucket share a micro-batch, so that little is
padded. Requests that begin with the same tokens stand next to each other, so that the engine finds
the shared prefix in its cache. No micro-batch exceeds its budgets.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nightjar.jobs.records import EncodedRequest, NewMicroBatch
from nightjar.jobs.states import RequestKind
from nightjar.pipeline.queue.queues import bucket_for

# Two requests share a prefix when this many leading tokens are equal: a system prompt, a few-shot
# preamble, the query of several rank requests. Shorter prefixes save too little.
PREFIX_TOKENS = 32

# A GPU worker holds the adapters of what it computes, whatever the bound of its memory for them.
MOST_ADAPTERS = 16
"""Different LoRA adapters in one micro-batch."""


@dataclass(frozen=True, slots=True)
class Packable:
    """An encoded request with the sizes that packing needs."""

    request: EncodedRequest
    kind: RequestKind
    max_tokens: int

    @property
    def length(self) -> int:
        """Tokens of the longest sequence at prefill: prompt, or query with longest document."""
        first, *documents = self.request.segments
        return len(first) + max(map(len, documents), default=0)

    @property
    def cost(self) -> int:
        """All tokens that may be computed: prompt and answer, or query and every document."""
        return sum(map(len, self.request.segments)) + self.max_tokens


def pack(
    requests: Sequence[Packable], *, most_requests: int, most_tokens: int
) -> list[NewMicroBatch]:
    """Group requests into micro-batches.

    Args:
        requests: What to pack; kinds may be mixed.
        most_requests: Most requests in one micro-batch.
        most_tokens: Most tokens in one micro-batch; a larger request gets its own.

    Returns:
        Micro-batches that hold every request exactly once.
    """
    groups: dict[tuple[RequestKind, int], list[_Row]] = defaultdict(list)
    for kind, bucket, row in _with_buckets(requests):
        groups[kind, bucket].append(row)
    batches = []
    for (kind, bucket), rows in groups.items():
        rows.sort()
        for ids, tokens in _cut(rows, most_requests, most_tokens):
            batches.append(NewMicroBatch(kind, bucket, request_ids=ids, tokens=tokens))
    return batches


# By adapter, then by shared prefix, then by length, then by arrival: (adapter or "", first tokens,
# length, request id, cost).
_Row = tuple[str, tuple[int, ...], int, int, int]


def _with_buckets(requests: Sequence[Packable]) -> Iterator[tuple[RequestKind, int, _Row]]:
    """Give each request its bucket; requests that share a prefix take the longest one's."""
    longest: dict[tuple[RequestKind, tuple[int, ...]], int] = {}
    rows: list[tuple[RequestKind, _Row]] = []
    for request in requests:
        prefix, length = tuple(request.request.segments[0][:PREFIX_TOKENS]), request.length
        if len(prefix) == PREFIX_TOKENS and length > longest.get((request.kind, prefix), 0):
            longest[request.kind, prefix] = length
        adapter = request.request.adapter or ""
        rows.append((request.kind, (adapter, prefix, length, request.request.id, request.cost)))
    for kind, row in rows:
        _, prefix, length, *_ = row
        yield kind, bucket_for(longest.get((kind, prefix), length)), row


def _cut(
    rows: Sequence[_Row], most_requests: int, most_tokens: int
) -> Iterator[tuple[list[int], int]]:
    """Return the request ids and the tokens of each micro-batch."""
    ids: list[int] = []
    adapters: set[str] = set()
    tokens = 0
    for adapter, _, _, id_, cost in rows:
        adapters.add(adapter)
        full = len(ids) == most_requests or tokens + cost > most_tokens
        if ids and (full or len(adapters) > MOST_ADAPTERS):
            yield ids, tokens
            ids, adapters, tokens = [], {adapter}, 0
        ids.append(id_)
        tokens += cost
    if ids:
        yield ids, tokens
