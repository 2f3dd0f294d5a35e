"""How a request is refused."""


class RefusedError(Exception):
    """A request that cannot be computed: `code` for programs, the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
