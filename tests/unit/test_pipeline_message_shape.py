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
from tests.foreign_messages import foreign_messages, good_message

QUEUE = "generate-32"
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
