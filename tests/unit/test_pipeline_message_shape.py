"""Which messages are handed to Celery: Nightjar's own, and nothing else."""

import json
from collections.abc import Mapping

import pytest
from celery import Celery
from pydantic import SecretStr

from nightjar.pipeline.queue.celery_app import COMPUTE_TASK, create_celery_app
from nightjar.pipeline.queue.message_fields import LARGEST_TASK_BYTES
from nightjar.pipeline.queue.message_shape import (
    MessageError,
    check_message,
    is_control_queue,
    is_task_queue,
    read_message,
)
from nightjar.pipeline.queue.signing import Signer
from nightjar.pipeline.settings import Settings
from tests.foreign_messages import encoded, foreign_messages, good_message

QUEUE = "generate-32"
CONTROL = "gpu-7@host.celery.pidbox"
FOREIGN = foreign_messages(QUEUE, COMPUTE_TASK)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_message_is_refused(name: str) -> None:
    with pytest.raises(MessageError):
        check_message(read_message(FOREIGN[name], QUEUE), QUEUE)


def test_there_are_many_kinds() -> None:
    assert len(FOREIGN) > 100
    assert len(set(FOREIGN.values())) == len(FOREIGN)


def test_a_good_message_passes() -> None:
    raw = json.dumps(good_message(QUEUE, COMPUTE_TASK, micro_batch=1, epoch=0, alone=True)).encode()
    assert check_message(read_message(raw, QUEUE), QUEUE) == json.loads(raw)


def test_a_message_that_is_delivered_again_passes() -> None:
    message = good_message(QUEUE, COMPUTE_TASK, micro_batch=1, epoch=0)
    signer = Signer("a key of sixteen")
    signer.sign(message)
    message["headers"]["redelivered"] = message["properties"]["delivery_info"]["redelivered"] = True
    signer.check(check_message(message, QUEUE))


QUESTION = {
    "method": "ping",
    "arguments": {"limit": 1},
    "destination": ["planner-1@host", "gpu-7@host"],
    "pattern": "gpu-*@host",
    "matcher": "glob",
    "ticket": "a ticket",
    "reply_to": {"exchange": "reply.celery.pidbox", "routing_key": "an address"},
}


def question(**changes: object) -> Mapping[str, object]:
    """A question of remote control, with some fields of its body changed."""
    message = good_message(CONTROL, COMPUTE_TASK)
    headers = {"clock": 1, "expires": 1_795_000_000.5}
    return message | {"headers": headers, "body": encoded(QUESTION | changes)}


def test_a_question_passes() -> None:
    asked = question()
    assert check_message(asked, CONTROL) is asked


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", "shutdown"),
        ("method", None),
        ("arguments", []),
        ("arguments", {"limit": 1, "names": ["a"]}),
        ("destination", "gpu-7@host"),
        ("destination", ["gpu-7@host", {}]),
        ("destination", ["two\nlines"]),
        ("pattern", {}),
        ("matcher", "pcre"),
        ("ticket", 5),
        ("reply_to", {}),
        ("reply_to", {"exchange": "generate-32", "routing_key": "an address"}),
        ("reply_to", {"exchange": "reply.celery.pidbox", "routing_key": ""}),
        ("extra", 1),
    ],
)
def test_a_foreign_question_is_refused(field: str, value: object) -> None:
    with pytest.raises(MessageError):
        check_message(question(**{field: value}), CONTROL)


def test_the_name_of_a_task_may_be_long_and_no_longer() -> None:
    longest = "nightjar." + "x" * 246
    assert check_message(good_message(QUEUE, longest), QUEUE)
    with pytest.raises(MessageError, match="headers: task"):
        check_message(good_message(QUEUE, longest + "x"), QUEUE)


def test_arguments_are_few_and_plain() -> None:
    def with_arguments(*arguments: object) -> Mapping[str, object]:
        return good_message(QUEUE, COMPUTE_TASK) | {"body": encoded([[*arguments], {}, {}])}

    assert check_message(with_arguments(*range(16)), QUEUE)
    for arguments in (range(17), [1, []]):
        with pytest.raises(MessageError, match="the body's arguments"):
            check_message(with_arguments(*arguments), QUEUE)
    named = {f"name {n}": n for n in range(16)}
    assert check_message(good_message(QUEUE, COMPUTE_TASK, **named), QUEUE)
    for more in ({"one more": 1}, {"name 0": []}):
        with pytest.raises(MessageError, match="keyword arguments"):
            check_message(good_message(QUEUE, COMPUTE_TASK, **(named | more)), QUEUE)


def test_size_is_judged_before_anything_is_parsed() -> None:
    with pytest.raises(MessageError, match="bytes"):
        read_message(b"[" * (LARGEST_TASK_BYTES + 1), QUEUE)


@pytest.mark.parametrize(
    ("queue", "task", "control"),
    [
        ("plan", True, False),
        ("generate-32", True, False),
        ("worker@host.celery.pidbox", False, True),
        ("0770d628.reply.celery.pidbox", False, False),
        ("celeryev.0770d628", False, False),
    ],
)
def test_what_a_queue_carries(queue: str, task: bool, control: bool) -> None:
    assert (is_task_queue(queue), is_control_queue(queue)) == (task, control)


@pytest.mark.parametrize(
    "change",
    [
        {"body": "W10="},
        {"headers": {"task": "nightjar.tick"}},
        {"properties": {"priority": 9}},
        {"properties": {"delivery_tag": "another"}},
        {"properties": {"delivery_info": {"exchange": "", "routing_key": "plan"}}},
    ],
)
def test_a_change_breaks_the_signature(change: Mapping[str, object]) -> None:
    message = good_message(QUEUE, COMPUTE_TASK, micro_batch=1, epoch=0)
    signer = Signer("a key of sixteen")
    signer.sign(message)
    for part, value in change.items():
        message[part] = message[part] | value if isinstance(value, dict) else value
    with pytest.raises(MessageError, match="signature is wrong"):
        signer.check(message)


def test_the_order_of_fields_does_not_break_the_signature() -> None:
    message = good_message(QUEUE, COMPUTE_TASK, micro_batch=1, epoch=0)
    signer = Signer("a key of sixteen")
    signer.sign(message)
    message["headers"] = dict(reversed(message["headers"].items()))
    signer.check(dict(reversed(message.items())))


def test_an_unsigned_message_is_told_from_a_forged_one() -> None:
    message = good_message(QUEUE, COMPUTE_TASK, micro_batch=1, epoch=0)
    with pytest.raises(MessageError, match="it is not signed"):
        Signer("a key of sixteen").check(message)


def test_a_signature_of_another_key_is_wrong() -> None:
    message = good_message(QUEUE, COMPUTE_TASK, micro_batch=1, epoch=0)
    Signer("a key of sixteen").sign(message)
    with pytest.raises(MessageError, match="NIGHTJAR_MESSAGE_KEY"):
        Signer("another of sixteen").check(message)


def test_the_key_is_shown_nowhere() -> None:
    app: Celery = create_celery_app(
        Settings(
            broker_url=SecretStr("redis://127.0.0.1:1/0"), message_key=SecretStr("quite-secret-key")
        )
    )
    assert "quite-secret" not in repr(app.conf.broker_transport_options)
    assert "quite-secret" not in str(app.conf.table(with_defaults=False, censored=False))
