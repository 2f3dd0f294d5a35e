"""The exceptions of checkpoints/."""


class CheckpointError(Exception):
    """A model directory cannot be used; the message says why, which file, and how to correct it."""


class ShardError(CheckpointError):
    """A model cannot be split into so many shards, or not among these devices."""
