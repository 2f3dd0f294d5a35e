"""From the bytes of an OpenAI batch line to a request, or to an error that says how to mend it.

Messages name the line and the field, and never repeat the text of a prompt.
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import msgspec
from pydantic import BaseModel, ValidationError

from nightjar.jobs.lines.bodies import MAX_TOP_N, ChatBody, CompletionBody, RerankBody
from nightjar.jobs.records import JsonObject, NewRequest, RejectedRow, is_text
from nightjar.jobs.states import RequestKind
from nightjar.requests import BODY_TEMPERATURE, LIMITS

__all__ = [
    "MAX_LINE_BYTES",
    "BodyError",
    "CompletionBody",
    "RerankBody",
    "body_error",
    "parse_batch_line",
    "read_object",
    "validate_body",
]

MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_CUSTOM_ID = 512  # characters
MAX_REASON = 1_000  # characters of the error of a line that is no request
CHAT_URL = "/v1/chat/completions"
URLS = {
    "/v1/completions": RequestKind.GENERATE,
    CHAT_URL: RequestKind.GENERATE,
    "/v1/rerank": RequestKind.RANK,
}
UTF8_MARK = b"\xef\xbb\xbf"  # some editors write it at the beginning of a file

_INTEGERS = {"max_tokens", "n", "beam_width", "logprobs"}
# What to do about a field, by its name, when the type or range of its value is wrong. The hints of
# numbers follow from their limits.
HINTS = {
    **{
        name: f"give {'an integer' if name in _INTEGERS else 'a number'} {limit.words()}"
        for name, limit in LIMITS.items()
    },
    "model": "give the model's name, or leave it out",
    "temperature": f"give a number {LIMITS['temperature'].words(high=BODY_TEMPERATURE)}",
    "top_k": "give an integer, 0 or -1 to turn it off",
    "seed": "give a 64-bit integer",
    "min_tokens": "give an integer from 0 to max_tokens",
    "best_of": "leave it out",
    "early_stopping": "give true or false",
    "ignore_eos": "give true or false",
    "return_documents": "give true or false",
    "messages": 'give a list of {"role": ..., "content": ...}',
    "chat_template_kwargs": "give an object of names and values",
    "prompt": "give a text or a list of token ids",
    "prompt_vector": "give the name that the vectors were registered under",
    "adapter": "give the name that the adapter was registered under",
    "content_key": "give a text of 1 to 128 characters",
    "query": "give a text of at least one character",
    "documents": "give a list of texts",
    "top_n": f"give an integer from 1 to {MAX_TOP_N}",
}


class BodyError(ValueError):
    """A body that cannot be used; `code`, `param` and `message` go into the row's error."""

    def __init__(self, code: str, param: str | None, message: str) -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.code = code
        self.param = param
        self.message = message


@dataclass(slots=True)
class _Line:
    """What is known of a line while it is read."""

    index: int
    line: int
    custom_id: str | None = None

    def refuse(self, code: str, param: str | None, message: str) -> RejectedRow:
        place = f"line {self.line}, {param}" if param else f"line {self.line}"
        return RejectedRow(
            self.index, self.line, self.custom_id, code, f"{place}: {message}", param
        )


def parse_batch_line(
    raw: bytes,
    line: int,
    index: int,
    *,
    max_bytes: int = MAX_LINE_BYTES,
    only_url: str | None = None,
) -> NewRequest | RejectedRow:
    """The request of one batch line.

    `line` counts the file's lines from 1, `index` the job's rows from 0. A line with another URL
    than `only_url`, if that is given, is rejected. A line with `error` in the place of `body` is
    rejected with that error: its sender could not make a request of the row. Never raises on bad
    input: a line that cannot be used becomes a RejectedRow.
    """
    known = _Line(index, line)
    try:
        if len(raw) > max_bytes:
            _fail("line_too_long", None, f"is longer than {max_bytes} bytes; split its work")
        data = _decode_json(raw.removeprefix(UTF8_MARK) if line == 1 else raw, known)
        known.custom_id = _readable_custom_id(data.get("custom_id"))
        if "error" in data and "body" not in data:
            return _stated(known, data["error"])
        custom_id = _check_custom_id(data)
        url = _check_envelope(data, only_url)
        kind = URLS[url]
        body = validate_body(kind, data["body"], chat=url == CHAT_URL)
    except BodyError as error:
        return known.refuse(error.code, error.param, error.message)
    return NewRequest(index, line, custom_id, kind, body)


def _stated(known: _Line, error: object) -> RejectedRow:
    """The rejected row of a line that says itself why it is no request; raises BodyError."""
    given = error if isinstance(error, dict) else {}
    code, message, param = given.get("code"), given.get("message"), given.get("param")
    is_code = is_text(code, 64) and re.fullmatch(r"[a-z][a-z0-9_]*", str(code)) is not None
    if not is_code or not is_text(message, MAX_REASON) or not (param is None or is_text(param, 64)):
        _fail(
            "invalid_value",
            "error",
            f"must have a code and a message of at most {MAX_REASON} characters; send a request, "
            "or why there is none",
        )
    where = (known.index, known.line, known.custom_id)
    return RejectedRow(*where, str(code), str(message), None if param is None else str(param))


def validate_body(kind: RequestKind, body: object, *, chat: bool = False) -> JsonObject:
    """The body with every default filled in; raises BodyError.

    chat: a text is asked for by messages instead of a prompt.
    """
    generated = ChatBody if chat else CompletionBody
    try:
        if kind is RequestKind.RANK:
            return _plain(RerankBody.model_validate(body))
        return _plain(generated.model_validate(body))
    except ValidationError as error:
        raise body_error(error) from None


def read_object(raw: bytes) -> JsonObject:
    """The JSON object of these bytes; raises BodyError."""
    return _decode_json(raw, _Line(0, 1))


def _plain(body: BaseModel) -> JsonObject:
    """What `model_dump` gives, at a tenth of its price: the fields are plain JSON already."""
    values = body.__dict__.copy()
    for name in _EXCLUDED[type(body)]:
        del values[name]
    return values


_EXCLUDED: dict[type[BaseModel], list[str]] = {
    kind: [name for name, field in kind.__pydantic_fields__.items() if field.exclude]
    for kind in (ChatBody, CompletionBody, RerankBody)
}


def _fail(code: str, param: str | None, message: str) -> NoReturn:
    raise BodyError(code, param, message)


def _refuse_constant(name: str) -> NoReturn:
    raise _NoJsonNumberError(name)


class _NoJsonNumberError(ValueError):
    """NaN or an infinity, which Python reads and JSON does not have."""


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _decode_json(raw: bytes, known: _Line) -> JsonObject:
    """The object on the line; BodyError with the column where it is broken."""
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        data = _decode_slowly(raw, known)
    if not isinstance(data, dict):
        _fail("invalid_json", None, "is not a JSON object; write {...}")
    return data


def _decode_slowly(raw: bytes, known: _Line) -> object:
    """What Python's own decoder reads: more than msgspec does, and it says where a line is broken.

    What both read, they read alike.
    """
    try:
        return _DECODER.decode(raw.decode())
    except _NoJsonNumberError as error:
        with suppress(ValueError, RecursionError):
            lenient = json.loads(raw)
            if isinstance(lenient, dict):
                known.custom_id = _readable_custom_id(lenient.get("custom_id"))
        _fail("invalid_json", None, f"holds {error}, which JSON lacks; give a finite number")
    except UnicodeDecodeError as error:
        _fail(
            "invalid_encoding",
            None,
            f"is not UTF-8 (byte {error.start + 1}); encode it as UTF-8",
        )
    except json.JSONDecodeError as error:
        _fail(
            "invalid_json", None, f"is broken JSON at column {error.colno}: {error.msg}; correct it"
        )
    except RecursionError:
        _fail("invalid_json", None, "is nested too deeply; flatten it")
    except ValueError:
        # Python refuses to read integers of thousands of digits.
        _fail("invalid_json", None, "holds a number with too many digits; shorten it")


def _readable_custom_id(value: object) -> str | None:
    """The custom_id as far as an error row can carry it."""
    if not isinstance(value, str) or not value or "\x00" in value:
        return None
    return value[:MAX_CUSTOM_ID].encode(errors="replace").decode()


def _check_custom_id(data: JsonObject) -> str:
    if data.get("custom_id") is None:
        _fail("missing_field", "custom_id", "is missing; give each line a text of its own")
    value = data["custom_id"]
    if not isinstance(value, str):
        _fail("invalid_value", "custom_id", "must be a text; put it in quotes")
    if not value:
        _fail("invalid_value", "custom_id", "is empty; give each line a text of its own")
    if len(value) > MAX_CUSTOM_ID:
        _fail(
            "invalid_value",
            "custom_id",
            f"has {len(value)} characters; give at most {MAX_CUSTOM_ID}",
        )
    if _readable_custom_id(value) != value:
        _fail("invalid_value", "custom_id", "holds a character that is not text; remove it")
    return value


def _check_envelope(data: JsonObject, only_url: str | None) -> str:
    """The line's `url`; checks `method` and that there is a body."""
    if data.get("method") is None:
        _fail("missing_field", "method", 'is missing; write "method": "POST"')
    if data["method"] != "POST":
        _fail("invalid_value", "method", 'must be "POST"')
    if data.get("url") is None:
        _fail("missing_field", "url", f"is missing; give one of {', '.join(URLS)}")
    url = data["url"]
    if not isinstance(url, str) or url not in URLS:
        _fail("unsupported", "url", f"is not served; give one of {', '.join(URLS)}")
    if only_url not in (None, url):
        mend = f"give {only_url} on each line, or make the batch without strict"
        _fail("url_mismatch", "url", f"is {url}, not the batch's endpoint; {mend}")
    if data.get("body") is None:
        _fail("missing_field", "body", "is missing; give an object with the request")
    if not isinstance(data["body"], dict):
        _fail("invalid_value", "body", "must be an object with the request")
    return url


def body_error(error: ValidationError) -> BodyError:
    """Return the first of pydantic's findings in this project's words."""
    # Without input and url: a prompt must not find its way into a message.
    first = error.errors(include_url=False, include_input=False)[0]
    context = first.get("ctx", {})
    name = context.get("field") or (str(first["loc"][0]) if first["loc"] else None)
    param = f"body.{name}" if name else "body"
    if "message" in context:
        return BodyError(first["type"], param, str(context["message"]))
    hint = HINTS.get(str(name), "correct it")
    if first["type"] == "missing":
        return BodyError("missing_field", param, f"is missing; {hint}")
    finding = first["msg"].removeprefix("Input ")
    return BodyError("invalid_value", param, f"{finding[:1].lower()}{finding[1:]}; {hint}")
