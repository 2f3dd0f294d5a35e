"""One record of what is asked: bodies, hints, storage and the engine's checks agree with it."""

import dataclasses

import pytest

from nightjar.gpu_worker.engine.errors import RefusedError
from nightjar.gpu_worker.engine.sampling_checks import check_sampling
from nightjar.jobs.lines.bodies import CompletionBody, GenerationBody
from nightjar.jobs.lines.parsing import HINTS, BodyError, validate_body
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store.bodies import load_body
from nightjar.requests import (
    BODY_TEMPERATURE,
    LIMITS,
    SAME_IN_BODY,
    Limit,
    SamplingParams,
)

# Numbers of a request body whose range is the record's own.
SHARED = sorted(set(SAME_IN_BODY) & set(LIMITS) - {"max_tokens", "min_tokens", "temperature"})


def test_a_body_has_every_field_of_the_record() -> None:
    fields = {one.name for one in dataclasses.fields(SamplingParams)} - {"beams"}
    fields |= {"beam_width", "length_penalty", "early_stopping"}
    of_body = {"model", "prompt_vector", "adapter", "content_key"}
    assert set(GenerationBody.model_fields) - of_body - {"best_of"} == fields
    assert set(load_body('{"prompt": "a"}')) - of_body - {"prompt"} == fields - {"max_tokens"}


@pytest.mark.parametrize("name", SHARED)
def test_a_limit_holds_for_bodies_and_engine_alike(name: str) -> None:
    limit = LIMITS[name]
    step = 1 if isinstance(getattr(SamplingParams(1), name), int) or name == "logprobs" else 0.001
    outside = [limit.high + step, limit.low if limit.above else limit.low - step]
    if name == "top_k":  # a body says -1 for off; the engine leaves the rest to the vocabulary
        outside = [-2]
    for value in outside:
        with pytest.raises(BodyError) as caught:
            validate_body(RequestKind.GENERATE, {"prompt": "a", name: value})
        assert caught.value.message.endswith(HINTS[name])
        with pytest.raises(RefusedError, match=f"{name} is"):
            check_sampling(SamplingParams(1, **{"temperature": 1.0, name: value}), 100)
    validate_body(RequestKind.GENERATE, {"prompt": "a", name: limit.high})
    check_sampling(SamplingParams(1, **{"temperature": 1.0, name: limit.high}), 100)


def test_a_body_takes_less_temperature_than_the_engine() -> None:
    check_sampling(SamplingParams(1, temperature=BODY_TEMPERATURE + 1), 100)
    with pytest.raises(BodyError, match=r"from 0 \(greedy\) to 2"):
        validate_body(RequestKind.GENERATE, {"prompt": "a", "temperature": BODY_TEMPERATURE + 1})


def test_ranges_are_in_the_schema_of_a_body() -> None:
    """Beside the number stands null, which clients send for "as if absent"."""
    properties = CompletionBody.model_json_schema()["properties"]
    assert properties["min_p"]["anyOf"] == [
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "null"},
    ]
    assert properties["top_p"]["anyOf"] == [
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "null"},
    ]


def test_a_range_in_words() -> None:
    assert Limit(0, 1, low_means="off").words() == "from 0 (off) to 1"
    assert Limit(0, 1, above=True).words() == "above 0 and at most 1"
    assert Limit(0.01, 100, off=1).words() == "from 0.01 to 100; 1 is off"
    assert Limit(0, 100).words(high=2) == "from 0 to 2"


def test_a_nan_is_in_no_range() -> None:
    assert not any(limit.holds(float("nan")) for limit in LIMITS.values())
