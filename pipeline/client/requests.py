"""Typed requests: the API's own records of a body, with a custom_id.

The fields are those of `jobs/lines/bodies.py`, so that there is one list of them. A request is
checked when it is made. Only the fields that were given are sent, and the API fills in the others.
"""

from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from nightjar.jobs.lines.bodies import ChatBody, CompletionBody, RerankBody
from nightjar.jobs.lines.parsing import CHAT_URL, MAX_CUSTOM_ID, body_error
from nightjar.jobs.records import JsonObject
from nightjar.pipeline.client.errors import RequestError

COMPLETIONS_URL = "/v1/completions"
RERANK_URL = "/v1/rerank"


class _Request(BaseModel):
    """What all requests have: a custom_id, and errors that do not repeat a prompt."""

    model_config = ConfigDict(hide_input_in_errors=True)
    url: ClassVar[str]

    custom_id: Annotated[str, Field(min_length=1, max_length=MAX_CUSTOM_ID)] | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _in_our_words(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            found = body_error(error)
            field = (found.param or "").removeprefix("body.")
            place = f"{cls.__name__}: {field}" if field else cls.__name__
            raise RequestError(f"{place}: {found.message}") from None

    def body(self) -> JsonObject:
        """Return the fields that were given, as the API takes them."""
        given = self.model_fields_set - {"custom_id"}
        return {
            name: value
            for name, field in type(self).model_fields.items()
            if name in given and not field.exclude and (value := getattr(self, name)) is not None
        }


class Generate(_Request, CompletionBody):
    """A prompt to continue, with the fields of `/v1/completions`.

    custom_id: Comes back with the result; by default `row-` and the row's number from 0.
    """

    url: ClassVar[str] = COMPLETIONS_URL


class Chat(_Request, ChatBody):
    """Messages to answer, with the fields of `/v1/chat/completions`.

    As in OpenAI's API, logprobs is true or false, and top_logprobs a number.
    """

    url: ClassVar[str] = CHAT_URL

    # ChatBody accepts both, and keeps them as logprobs and max_tokens.
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None

    def body(self) -> JsonObject:
        """Return the fields that were given, as the API takes them."""
        found = super().body()
        top: Any = found.pop("logprobs", None)
        return found if top is None else found | {"logprobs": True, "top_logprobs": top}


class Rank(_Request, RerankBody):
    """Documents to rank after a query, with the fields of `/v1/rerank`."""

    url: ClassVar[str] = RERANK_URL


Request = Generate | Chat | Rank
