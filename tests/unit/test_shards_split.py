"""Which part of a model a rank computes, and which numbers of ranks there can be."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nightjar.checkpoints import ModelConfig, ModelDirectory, ShardError, shard_counts
from nightjar.gpu_worker.models.split import Part, channels, width


def shaped(config: ModelConfig, heads: int, kv_heads: int, **sizes: int) -> ModelConfig:
    return replace(config, n_heads=heads, n_kv_heads=kv_heads, **sizes)


@given(
    kv_heads=st.integers(1, 12),
    group=st.integers(1, 12),
    ranks=st.integers(1, 24),
    inner=st.integers(24, 300),
    vocab=st.integers(24, 300),
)
def test_parts_cover_the_model_once(directory, kv_heads, group, ranks, inner, vocab):
    sizes = {"intermediate_size": inner, "vocab_size": vocab}
    config = shaped(directory.config, kv_heads * group, kv_heads, **sizes)
    assume(ranks in shard_counts(config))
    parts = [Part.of(config, rank, ranks) for rank in range(ranks)]
    for name, total in (("heads", config.n_heads), ("inner", inner), ("tokens", vocab)):
        ranges = [getattr(part, name) for part in parts]
        assert [n for part in ranges for n in range(part.start, part.stop)] == list(range(total))
        assert max(map(width, ranges)) - min(map(width, ranges)) <= 1
    assert [width(part.tokens) for part in parts] == parts[0].token_counts(vocab)


@given(kv_heads=st.integers(1, 12), group=st.integers(1, 12), ranks=st.integers(1, 24))
def test_every_query_head_finds_its_keys_where_the_kernels_look(directory, kv_heads, group, ranks):
    """A kernel reads head q with key-value head q // (heads / key-value heads) of its own."""
    config = shaped(directory.config, kv_heads * group, kv_heads)
    assume(ranks in shard_counts(config))
    for rank in range(ranks):
        part = Part.of(config, rank, ranks)
        own = part.config(config)
        for head in range(own.n_heads):
            local = head // (own.n_heads // own.n_kv_heads)
            assert part.kv_heads.start + local == (part.heads.start + head) // group


def test_fewer_key_value_heads_than_ranks_are_held_several_times(directory: ModelDirectory) -> None:
    config = shaped(directory.config, 8, 2)
    held = [Part.of(config, rank, 4).kv_heads for rank in range(4)]
    assert held == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(12, 12, 5), (4, 4, 8), (6, 3, 2), (4, 4, 0)]
)
def test_heads_that_do_not_divide_are_told_with_what_is_possible(
    directory: ModelDirectory, heads: int, kv_heads: int, ranks: int
) -> None:
    config = shaped(directory.config, heads, kv_heads)
    possible = ", ".join(map(str, shard_counts(config)))
    with pytest.raises(ShardError, match=rf"{ranks} shards.*{heads} .*possible are {possible}"):
        Part.of(config, 0, ranks)


def test_one_rank_is_the_whole_model(directory: ModelDirectory) -> None:
    part = Part.of(directory.config)
    assert part.config(directory.config) == directory.config
    assert part.is_first


def test_channels_of_heads() -> None:
    assert channels(slice(2, 4), 16) == slice(32, 64)
