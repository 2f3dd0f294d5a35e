"""How a request is refused, and the engine itself."""


class RefusedError(Exception):
    """A request that cannot be computed: `code` for programs, the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class CannotComputeError(Exception):
    """There can be no engine here; the message says why and what mends it."""
