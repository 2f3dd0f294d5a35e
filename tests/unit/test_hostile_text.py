"""Markup, terminal escapes and marks of direction in what people send: told, and harmless."""

import json

import pytest

from nightjar.jobs.lines.parsing import parse_batch_line
from nightjar.jobs.records import NewRequest, RejectedRow
from nightjar.pipeline.front.cli.console import errors, say
from nightjar.visible import visible_lines

HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202egpj\u2066\r"
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
BODY = {"prompt": "a", "max_tokens": 4}


def line(**changes: object) -> NewRequest | RejectedRow:
    return parse_batch_line(json.dumps({**LINE, "body": BODY, **changes}).encode(), 1, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": HOSTILE},
        {"url": HOSTILE},
        {"body": {**BODY, HOSTILE: 1}},
        {"body": {**BODY, "max_tokens": HOSTILE}},
        {"body": {**BODY, "stop": [HOSTILE, {HOSTILE: 1}]}},
        {"body": {**BODY, "logit_bias": {HOSTILE: 1}}},
        {"body": HOSTILE},
        {"url": "/v1/chat/completions", "body": {"messages": [{"role": HOSTILE, "content": "a"}]}},
        {"url": "/v1/rerank", "body": {"query": "a", "documents": [{HOSTILE: "a"}]}},
    ],
)
def test_an_error_repeats_nothing_that_steers_a_terminal(changes: dict[str, object]) -> None:
    row = line(custom_id=HOSTILE, **changes)
    if isinstance(row, RejectedRow):
        assert row.custom_id == HOSTILE  # the answer names its line as it was sent
        assert row.message.isprintable(), row.message
        assert (row.param or "").isprintable()


def test_most_of_these_are_refused() -> None:
    assert isinstance(line(custom_id=HOSTILE), NewRequest)
    refused = line(custom_id=HOSTILE, body={**BODY, HOSTILE: 1})
    assert isinstance(refused, RejectedRow)
    assert "\\x1b[2J" in refused.message


def test_a_message_of_a_command_keeps_its_lines_and_steers_nothing() -> None:
    with errors.capture() as captured:
        say(f"first {HOSTILE}\nsecond [bold]{HOSTILE}")
    first, second = captured.get().splitlines()
    assert first.isprintable()
    assert second.isprintable()
    assert "\\x1b]0;owned\\x07\\u202egpj\\u2066\\x0d" in first
    assert second.startswith("second [bold]")
    assert visible_lines("a\nb" + "c" * 9_000, most=5) == "a\nbcccc…"
