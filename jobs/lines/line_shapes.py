"""What a line of output holds, as types: the writer of lines and the API's document share them."""

from typing_extensions import TypedDict

from nightjar.jobs.records import JsonObject


class LineResponse(TypedDict):
    """The answer to a request: what it asked for, or `error` in `body`, with a status of 400 up."""

    status_code: int
    request_id: str
    body: JsonObject | None


class LineError(TypedDict):
    """Why a request was not computed."""

    code: str
    message: str


class OutputLine(TypedDict):
    """The outcome of one request: exactly one of `response` and `error` is set."""

    id: str
    custom_id: str | None
    response: LineResponse | None
    error: LineError | None
