"""Request bodies as they are stored: without what most requests leave at its default.

A validated body has some 25 fields, of which a request sets two or three. A row is written three
times on its way (submitted, planned, ended), so its bytes are what the database works on.
"""

from collections.abc import Mapping
from typing import Any

from nightjar.jobs.records import JsonObject
from nightjar.jobs.store.json_text import dump_json, load_json

# Rows in databases rely on these values: never change one, whatever the schemas' defaults become.
# A field that is new may be added where a request without it means the same.
_ALL: Mapping[str, Any] = {
    "model": None,
    "prompt_vector": None,
    "adapter": None,
    "content_key": None,
}
_GENERATE: Mapping[str, Any] = {
    **_ALL,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "top_a": 0.0,
    "seed": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "bad_words": [],
    "stop": None,
    "stop_token_ids": [],
    "min_tokens": 0,
    "ignore_eos": False,
    "n": 1,
    "beam_width": None,
    "length_penalty": 1.0,
    "early_stopping": False,
    "logprobs": None,
}
_RANK: Mapping[str, Any] = {**_ALL, "top_n": None, "return_documents": False}
_NONE = object()  # the default of a field that has none


def dump_body(body: JsonObject) -> str:
    """The text that stands for a validated body; StoreError for what JSON cannot say."""
    usual = _usual(body)
    told = {}
    for name, value in body.items():
        default = usual.get(name, _NONE)
        # 1, 1.0 and True are equal, and not the same in JSON.
        is_usual = default is value or (default == value and type(default) is type(value))
        if not is_usual:
            told[name] = value
    return dump_json(told)


def load_body(text: str | bytes) -> JsonObject:
    """The whole body behind `dump_body`; its values are shared and must not be changed."""
    told = load_json(text)
    return {**_usual(told), **told}


def _usual(body: JsonObject) -> Mapping[str, Any]:
    return _RANK if "query" in body else _GENERATE
