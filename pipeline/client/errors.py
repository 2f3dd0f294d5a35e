"""The exceptions of the client, all below `ClientError`."""


class ClientError(Exception):
    """The API refused a call (the message is its answer) or cannot be reached."""


class UnreachableError(ClientError):
    """The API cannot be reached, or what answers is not the API."""


class RefusedError(ClientError):
    """The API refused a call.

    Attributes:
        status: The HTTP status.
        code: For programs, such as `unknown_job`; None if the answer has none.
        param: The part of the call that is at fault, if one is.
    """

    def __init__(self, message: str, status: int, code: str | None, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class RequestError(ClientError):
    """What was given cannot become a request; nothing was sent."""


class UnfinishedError(ClientError):
    """A job is not over, and what was asked for needs all of its results."""


class WaitTimeoutError(ClientError, TimeoutError):
    """A job was not over in time; it goes on."""
