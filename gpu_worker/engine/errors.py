"""Errors: a refused request, and an engine that cannot be made."""


class RefusedError(Exception):
    """A request that cannot be computed: `code` for programs, the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class CannotComputeError(Exception):
    """No engine can be made here; the message says why and how to correct it."""
