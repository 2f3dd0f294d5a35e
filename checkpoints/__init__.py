"""Reads model directories: configuration, tokenizer, weight files.  Needs no torch."""

from nightjar.checkpoints.chat_template import ChatTemplate, ChatTemplateError
from nightjar.checkpoints.config import ModelConfig
from nightjar.checkpoints.directory import ModelDirectory
from nightjar.checkpoints.errors import CheckpointError, ShardError
from nightjar.checkpoints.families import read_config
from nightjar.checkpoints.shards import check_shards, shard_counts
from nightjar.checkpoints.tokenizer import PROMPT_TOKEN, Tokenizer

__all__ = [
    "PROMPT_TOKEN",
    "ChatTemplate",
    "ChatTemplateError",
    "CheckpointError",
    "ModelConfig",
    "ModelDirectory",
    "ShardError",
    "Tokenizer",
    "check_shards",
    "read_config",
    "shard_counts",
]
