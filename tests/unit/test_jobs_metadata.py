"""The pairs that a job may carry."""

import json

import pytest

from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.parameters import parse_metadata


def test_good_metadata() -> None:
    assert parse_metadata(None) == {}
    assert parse_metadata("{}") == {}
    assert parse_metadata('{"night": "밤"}') == {"night": "밤"}


@pytest.mark.parametrize(
    "metadata",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"a": 1}',
        '{"": "x"}',
        '{"a": "\\u0000"}',
        '{"a": "\\ud800"}',
        json.dumps({"k" * 65: "v"}),
        json.dumps({"k": "v" * 513}),
        json.dumps({str(number): "v" for number in range(17)}),
    ],
)
def test_bad_metadata(metadata: str) -> None:
    with pytest.raises(RefusedRequestError) as caught:
        parse_metadata(metadata)
    assert (caught.value.status, caught.value.param) == (400, "metadata")
