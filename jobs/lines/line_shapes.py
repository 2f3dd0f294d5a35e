"""What a line of output holds, as types: the writer of lines and the API's document share them."""

from typing_extensions import TypedDict

from nightjar.jobs.records import JsonObject


class LineResponse(TypedDict):
    """The answer to a request that succeeded."""

    status_code: int
    request_id: str
    body: JsonObject | None


class LineError(TypedDict):
    """Why a request failed; `param` names the field at fault, `line` the line of the upload."""

    code: str
    message: str
    param: str | None
    line: int


class OutputLine(TypedDict):
    """The outcome of one request: exactly one of `response` and `error` is set."""

    id: str
    custom_id: str | None
    response: LineResponse | None
    error: LineError | None
