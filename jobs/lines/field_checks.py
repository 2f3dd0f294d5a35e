"""The checks of one field's value in a request body: texts, token ids, documents, messages.

Each check returns the value in its normal form, or raises what `refuse` makes.
"""

import math
import re

from pydantic_core import PydanticCustomError

from nightjar.requests import (
    LIMITS,
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_DOCUMENTS,
    MAX_LOGIT_BIAS,
    MAX_STOP_BYTES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOKEN_ID,
)

MAX_MESSAGES = 10_000
MAX_ROLE = 64  # characters
MAX_VARIABLE_DEPTH = 32

# What a chat template is given beside the request's own variables.
TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# Each id can be written in one way only, so that no token is given twice.
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_BIAS = LIMITS["logit_bias"]


def refuse(code: str, message: str, field: str | None = None) -> PydanticCustomError:
    """Return the error to raise for a value: its code, a message, and the field if not this one."""
    # The message is passed as context, so that braces in it are not placeholders.
    return PydanticCustomError(code, "{message}", {"message": message, "field": field})


def _check_text(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise refuse(
                "invalid_encoding",
                "holds half of a surrogate pair, which is no character; send both halves "
                "(such as \\ud83d\\ude00) or plain UTF-8",
            ) from None
    return value


def check_prompt(value: object) -> object:
    """Check one prompt: a text or token ids; a list of one text becomes that text."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise refuse("invalid_value", "is empty; give at least one character")
        return _check_text(value)
    if not isinstance(value, list):
        raise refuse("invalid_value", "must be a text or a list of token ids")
    if not value:
        raise refuse("invalid_value", "is empty; give at least one token id")
    if any(isinstance(item, (str, list)) for item in value):
        raise refuse("unsupported", "holds several prompts; write one line for each of them")
    if not all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in value):
        raise refuse("invalid_value", f"token ids must be integers from 0 to {MAX_TOKEN_ID}")
    return value


def _check_texts(value: object, most: int, most_bytes: int) -> list[object]:
    """Check a text or several, none of them empty or too long; return them as a list."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise refuse("invalid_value", "must be a text or a list of texts")
    if len(texts) > most:
        raise refuse("invalid_value", f"holds {len(texts)} texts; give at most {most}")
    for text in texts:
        if not isinstance(text, str):
            raise refuse("invalid_value", "must be a text or a list of texts")
        if not text:
            raise refuse("invalid_value", "holds an empty text; remove it")
        if len(_check_text(text).encode()) > most_bytes:
            raise refuse("invalid_value", f"holds a text of more than {most_bytes} bytes")
    return texts


def check_stop(value: object) -> object:
    """Check stop strings: one, or a list."""
    return _check_texts(value, MAX_STOPS, MAX_STOP_BYTES)


def check_bad_words(value: object) -> object:
    """Check words that are not generated: one, or a list."""
    return _check_texts(value, MAX_BAD_WORDS, MAX_BAD_WORD_BYTES)


def check_stop_token_ids(value: object) -> object:
    """Check a list of token ids."""
    if not isinstance(value, list) or not all(
        type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in value
    ):
        raise refuse("invalid_value", f"must be a list of integers from 0 to {MAX_TOKEN_ID}")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise refuse("invalid_value", f"holds {len(value)} ids; give at most {MAX_STOP_TOKEN_IDS}")
    return value


def check_logit_bias(value: object) -> object:
    """Check biases by token id; the ids are texts, as all keys are in JSON."""
    if not isinstance(value, dict):
        raise refuse("invalid_value", "must be an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise refuse("invalid_value", f"holds {len(value)} tokens; give at most {MAX_LOGIT_BIAS}")
    biases: dict[str, float] = {}
    for token, bias in value.items():
        if not _TOKEN_ID.fullmatch(token) or int(token) > MAX_TOKEN_ID:
            raise refuse("invalid_value", f'its keys must be token ids, "0" to "{MAX_TOKEN_ID}"')
        if type(bias) not in (int, float) or not _BIAS.holds(bias):
            raise refuse("invalid_value", f"the bias of token {token} must be {_BIAS.words()}")
        biases[token] = float(bias)
    return biases


def check_documents(value: object) -> object:
    """Check documents, return plain texts; Cohere's {"text": ...} is accepted."""
    if not isinstance(value, list):
        raise refuse("invalid_value", "must be a list of texts")
    if not value:
        raise refuse("invalid_value", "is empty; give at least one document")
    if len(value) > MAX_DOCUMENTS:
        raise refuse(
            "invalid_value",
            f"holds {len(value)} documents; give at most {MAX_DOCUMENTS} a line",
        )
    return [_document_text(item, number) for number, item in enumerate(value)]


def _document_text(item: object, number: int) -> str:
    text = item.get("text") if isinstance(item, dict) else item
    if not isinstance(text, str):
        raise refuse("invalid_value", f'document {number} must be a text or {{"text": ...}}')
    if not text:
        raise refuse("invalid_value", f"document {number} is empty; remove it or give it a text")
    return _check_text(text)


def _check_optional_text(value: object) -> object:
    return _check_text(value) if isinstance(value, str) else value


def check_name(value: object) -> object:
    """Check a name that is stored; PostgreSQL stores no NUL character."""
    if isinstance(value, str) and "\x00" in _check_text(value):
        raise refuse("invalid_value", "holds a NUL character; remove it")
    return value


def check_query(value: object) -> object:
    """Check the query of a ranking request."""
    if value == "":
        raise refuse("invalid_value", "is empty; give at least one character")
    return _check_optional_text(value)


def check_messages(value: object) -> object:
    """Check messages, return each with its role and text; text parts are joined."""
    if not isinstance(value, list):
        raise refuse("invalid_value", 'must be a list of {"role": ..., "content": ...}')
    if not value:
        raise refuse("invalid_value", "is empty; give at least one message")
    if len(value) > MAX_MESSAGES:
        raise refuse(
            "invalid_value", f"holds {len(value)} messages; give at most {MAX_MESSAGES} a line"
        )
    return [_message(item, number) for number, item in enumerate(value)]


def _message(item: object, number: int) -> dict[str, str]:
    fields = {k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else {}
    role = fields.pop("role", None)
    if not isinstance(role, str) or not 1 <= len(role) <= MAX_ROLE:
        raise refuse("invalid_value", f'message {number} needs a role, such as "user"')
    message = {"role": _check_text(role), "content": _content(fields.pop("content", None), number)}
    name = fields.pop("name", None)
    if isinstance(name, str):
        message["name"] = _check_text(name)
    elif name is not None:
        raise refuse("invalid_value", f"message {number}: name must be a text")
    if fields:
        raise refuse(
            "unsupported",
            f"message {number} holds more than role, content and name; calls of tools, images and "
            "the like are not supported",
        )
    return message


def _content(value: object, number: int) -> str:
    """Return the text of a message."""
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        for part in parts
    ]
    known = [_check_text(text) for text in texts if isinstance(text, str)]
    if len(known) < len(texts):
        raise refuse(
            "invalid_value",
            f"message {number}: content must be a text, or a list of "
            '{"type": "text", "text": ...}',
        )
    return "".join(known)


def check_variables(value: object) -> object:
    """Check the variables of a chat template."""
    if not isinstance(value, dict):
        raise refuse("invalid_value", "must be an object of names and values")
    taken = TEMPLATE_NAMES & value.keys()
    if taken:
        raise refuse("invalid_value", f"{min(taken)!r} is not for the request to set; take it out")
    _check_storable(value, MAX_VARIABLE_DEPTH)
    return value


def _check_storable(value: object, depth: int) -> None:
    """Refuse a template's variable that holds, at any depth, what cannot be stored."""
    if depth < 0:
        raise refuse(
            "invalid_value", f"is nested deeper than {MAX_VARIABLE_DEPTH} levels; flatten it"
        )
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise refuse("invalid_value", "holds a number that is too large; give a finite number")
    elif isinstance(value, dict):
        for name, inner in value.items():
            _check_text(name)
            _check_storable(inner, depth - 1)
    elif isinstance(value, list):
        for inner in value:
            _check_storable(inner, depth - 1)
