"""Splits a model among ranks: tensor parallelism (arXiv 1909.08053).

Projections into heads and into the feed-forward block are split by output, projections out of them
by input. So a layer needs two sums over the ranks. The LM head is split by token. Every rank has
the whole embedding table, all norms and positions, and its own residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nightjar.checkpoints import ModelConfig, check_shards


@dataclass(frozen=True, slots=True)
class Part:
    """Rank `rank` of `ranks`, and the ranges of the whole model that it computes.

    heads, kv_heads: query heads, and the key-value heads that they read; with fewer key-value heads
    than ranks, several ranks hold the same one.
    inner: channels of the feed-forward block; tokens: rows of the LM head.
    """

    rank: int
    ranks: int
    heads: slice
    kv_heads: slice
    inner: slice
    tokens: slice

    @staticmethod
    def of(config: ModelConfig, rank: int = 0, ranks: int = 1) -> Part:
        """The part of one rank.

        Raises:
            ShardError: The heads do not divide among so many ranks.
        """
        check_shards(config, ranks)
        kv_heads = _share(config.n_kv_heads, rank, ranks)
        if ranks > config.n_kv_heads:
            only = rank * config.n_kv_heads // ranks
            kv_heads = slice(only, only + 1)
        return Part(
            rank=rank,
            ranks=ranks,
            heads=_share(config.n_heads, rank, ranks),
            kv_heads=kv_heads,
            inner=_share(config.intermediate_size, rank, ranks),
            tokens=_share(config.vocab_size, rank, ranks),
        )

    @property
    def is_first(self) -> bool:
        """Whether this rank adds what only one may: the biases after a sum."""
        return self.rank == 0

    def token_counts(self, vocab_size: int) -> list[int]:
        """How many tokens each rank holds; they differ by one at most."""
        return [width(_share(vocab_size, rank, self.ranks)) for rank in range(self.ranks)]

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The configuration of what this rank computes; vocabulary and width stay the model's."""
        return replace(
            whole,
            n_heads=width(self.heads),
            n_kv_heads=width(self.kv_heads),
            intermediate_size=width(self.inner),
        )


def width(part: slice) -> int:
    """Return the length of a range of a Part."""
    return int(part.stop) - int(part.start)


def channels(heads: slice, size: int) -> slice:
    """Return the channels of a range of heads, `size` each."""
    return slice(heads.start * size, heads.stop * size)


def _share(total: int, rank: int, ranks: int) -> slice:
    """Return one of `ranks` ranges whose lengths differ by at most one."""
    return slice(total * rank // ranks, total * (rank + 1) // ranks)
