"""The numbers of shards that a model can be split into; `gpu_worker/models/split.py` splits it."""

from __future__ import annotations

from nightjar.checkpoints.config import ModelConfig
from nightjar.checkpoints.errors import ShardError


def shard_counts(config: ModelConfig) -> list[int]:
    """Return the numbers of shards that a model can be split into."""
    most = min(config.n_heads, config.vocab_size, config.intermediate_size)
    return [shards for shards in range(1, most + 1) if _divides(config, shards)]


def check_shards(config: ModelConfig, shards: int) -> None:
    """Raise ShardError, with the possible numbers, if the model cannot be split so."""
    possible = shard_counts(config)
    if shards not in possible:
        raise ShardError(
            f"{shards} shards: the model's {config.n_heads} attention heads "
            f"({config.n_kv_heads} of keys and values) do not divide among them; "
            f"possible are {', '.join(map(str, possible))}"
        )


def _divides(config: ModelConfig, shards: int) -> bool:
    """Whether every shard gets as many query heads, and whole groups or parts of one group."""
    kv_heads = config.n_kv_heads
    return config.n_heads % shards == 0 and (kv_heads % shards == 0 or shards % kv_heads == 0)
