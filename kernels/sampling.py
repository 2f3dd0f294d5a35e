"""Choosing the next token, and whether there is one to choose, by whichever backend serves the
scores."""

from torch import Tensor

from nightjar.kernels import cuda_ops, native, reference
from nightjar.kernels.cuda.launch import serves


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best token of each row, ties to the lowest id, and whether the row holds neither NaN nor
    infinity: float32[B, V] -> int64[B], bool[B].  Of a row that does, the token is any."""
    if native.argmax.serves(logits):
        return native.argmax.argmax(logits)
    best = cuda_ops.argmax if serves(logits) else reference.sampling.argmax
    return best(logits), reference.sampling.finite_rows(logits)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    draws: Tensor,
) -> Tensor:
    """Draw one token a row.

    logits: float32[B, V]; temperature: float32[B], > 0; top_k: int64[B], 0 = off; top_p:
    float32[B], 1 = off; min_p: float32[B], 0 = off; draws: float64[B] in [0, 1).  Returns int64[B].
    The temperature comes first, then top-k, then top-p over what top-k left, then min-p, the
    order of transformers.  All three are thresholds on the score, so equal scores stay or go
    together and no sort order can matter.  The draw walks the distribution in vocabulary order.
    """
    if serves(logits):
        return cuda_ops.sample(logits, temperature, top_k, top_p, min_p, draws)
    return reference.sampling.sample(logits, temperature, top_k, top_p, min_p, draws)


def uniform(seeds: Tensor, streams: Tensor, steps: Tensor) -> Tensor:
    """A number in [0, 1) for each (seed, stream, step): float64[B].

    seeds: int64[B], the key; streams: int64[B], below 2**32, and steps: int64[B], the counter.
    Philox 4x32-10: nothing is carried from call to call, so a request's numbers depend neither on
    its batch nor on a restart, and the streams of one seed (the samples of a request) are
    independent.  The same bits on every backend.
    """
    if serves(seeds):
        return cuda_ops.uniform(seeds, streams, steps)
    return reference.philox.uniform(seeds, streams, steps)
