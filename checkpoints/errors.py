"""The room's exception."""


class CheckpointError(Exception):
    """A model directory cannot be used; the message says what, which file and how to mend it."""
