"""The room's exceptions."""


class CheckpointError(Exception):
    """A model directory cannot be used; the message says what, which file and how to mend it."""


class ShardError(CheckpointError):
    """A model cannot be split as it was asked for, or not among these devices."""
