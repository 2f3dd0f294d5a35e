"""Sending one event to real receivers: signed, to checked addresses, in bounded time and bytes."""

import json
import ssl
import time
from datetime import UTC, datetime

import pytest
from openai import OpenAI
from standardwebhooks import Webhook as Standard
from standardwebhooks import WebhookVerificationError

from nightjar.jobs.events import ClaimedDelivery, EventType, event_body
from nightjar.jobs.webhooks.addresses import AddressGuard, resolve
from nightjar.jobs.webhooks.sender import WebhookSender, parse_retry_after
from nightjar.jobs.webhooks.signature import new_secret, signed_headers
from tests.receivers import (
    CERTIFICATE,
    answer_hugely,
    answer_slowly,
    answer_status,
    receiving,
)

SECRET = new_secret()
BODY = event_body(
    "evt_1",
    EventType.BATCH_COMPLETED,
    datetime.now(UTC),
    "batch_1",
    {"total": 2, "completed": 1, "failed": 1, "cancelled": 0},
)


def claimed(url: str) -> ClaimedDelivery:
    return ClaimedDelivery("whd_1", "wh_1", "evt_1", url, SECRET, BODY, 1, 0)


def local_sender(**options: float) -> WebhookSender:
    return WebhookSender(AddressGuard(allow_private=True), **options)


def test_the_package_of_standard_webhooks_accepts_the_signature() -> None:
    with receiving() as receiver:
        attempt = local_sender().send(claimed(receiver.url))
    assert (attempt.status, attempt.reason, attempt.delivered) == (200, None, True)
    (got,) = receiver.received
    assert got.path == "/hook?a=b"
    assert got.headers["content-type"] == "application/json"
    assert got.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert Standard(SECRET).verify(got.body, got.headers) == json.loads(BODY)
    with pytest.raises(WebhookVerificationError):
        Standard(SECRET).verify(got.body.replace(b"batch_1", b"batch_2"), got.headers)
    with pytest.raises(WebhookVerificationError):
        Standard(new_secret()).verify(got.body, got.headers)


def test_signatures_equal_those_of_the_package() -> None:
    moment = datetime(2026, 11, 23, tzinfo=UTC)
    ours = signed_headers(SECRET, "evt_1", int(moment.timestamp()), BODY.encode())
    assert ours["webhook-signature"] == Standard(SECRET).sign("evt_1", moment, BODY)


def test_the_openai_client_reads_the_event() -> None:
    with receiving() as receiver:
        assert local_sender().send(claimed(receiver.url)).delivered
    (got,) = receiver.received
    client = OpenAI(api_key="none", webhook_secret=SECRET)
    event = client.webhooks.unwrap(got.body, got.headers)
    assert (event.type, event.object, event.data.id) == ("batch.completed", "event", "batch_1")


@pytest.mark.parametrize("status", [400, 404, 410, 429, 500, 503])
def test_another_status_is_a_failure(status: int) -> None:
    with receiving(answer_status(status)) as receiver:
        attempt = local_sender().send(claimed(receiver.url))
    assert (attempt.status, attempt.reason) == (status, f"answered {status}")


NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("120", 120),
        (" 7 ", 7),
        ("Mon, 23 Nov 2026 12:01:00 GMT", 60),
        ("Mon, 23 Nov 2026 13:01:00 +0100", 60),
        ("Mon, 23 Nov 2026 12:01:00 -0000", 60),
        ("9" * 500, float("9" * 64)),
        *((text, None) for text in ("0", "", "-1", "1.5", "soon", "²", "1e3", "١٢")),
        ("Mon, 23 Nov 2026 11:00:00 GMT", None),
        ("Mon, 99 Nov 2026 11:00:00 GMT", None),
    ],
)
def test_a_receiver_says_when_it_may_be_asked_again(text: str, seconds: float | None) -> None:
    assert parse_retry_after(text, NOON) == seconds


@pytest.mark.parametrize("status", [400, 429, 503])
def test_the_wait_that_is_asked_for_is_in_the_attempt(status: int) -> None:
    answer = answer_status(status, **{"Retry-After": "90"})
    with receiving(answer) as receiver:
        assert local_sender().send(claimed(receiver.url)).retry_after_s == 90
    with receiving(answer_status(200, **{"Retry-After": "90"})) as receiver:
        assert local_sender().send(claimed(receiver.url)).retry_after_s is None


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_to_a_private_address_is_not_followed(status: int) -> None:
    with receiving() as inner:
        with receiving(answer_status(status, location=inner.url)) as outer:
            attempt = local_sender().send(claimed(outer.url))
        assert (attempt.status, attempt.delivered) == (status, False)
        assert inner.received == []


def test_a_huge_answer_is_not_read() -> None:
    with receiving(answer_hugely) as receiver:
        began = time.monotonic()
        attempt = local_sender(timeout_s=5).send(claimed(receiver.url))
        assert time.monotonic() - began < 2
        time.sleep(0.1)
        assert receiver.sent < 8_000_000, "what the sockets of both sides hold, and no more"
    assert attempt.delivered


def test_endless_headers_are_not_kept() -> None:
    with receiving(answer_slowly(0, 5)) as receiver:
        attempt = local_sender(timeout_s=5).send(claimed(receiver.url))
    assert not attempt.delivered
    assert attempt.reason is not None
    assert "RemoteProtocolError" in attempt.reason


def test_a_slow_answer_gains_no_time_by_pieces() -> None:
    with receiving(answer_slowly(0.05, 3)) as receiver:
        began = time.monotonic()
        attempt = local_sender(timeout_s=0.4).send(claimed(receiver.url))
        assert 0.3 < time.monotonic() - began < 1.5
    assert (attempt.status, attempt.reason) == (None, "no answer within 0.4 s")


def test_nobody_listens() -> None:
    with receiving() as receiver:
        pass
    attempt = local_sender().send(claimed(receiver.url))
    assert (attempt.status, attempt.reason) == (None, "the connection was refused")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "0x7f000001", "2130706433", "0177.0.0.1"])
def test_this_machine_is_not_called(host: str) -> None:
    with receiving(tls=True) as receiver:
        url = f"https://{host}:{receiver.port}/hook"
        attempt = WebhookSender(AddressGuard()).send(claimed(url))
        assert receiver.received == []
    assert attempt.status is None
    assert "is not called" in str(attempt.reason)


def test_a_name_is_resolved_once_and_that_address_is_called() -> None:
    """Its second answer would be another address; nobody asks for it."""
    answers = [["127.0.0.1"], ["169.254.169.254"]]
    asked = []

    def rebinding(host: str, port: int) -> list[str]:
        asked.append(host)
        return answers[min(len(asked), 2) - 1]

    guard = AddressGuard(allow_private=True, resolver=rebinding)
    with receiving() as receiver:
        url = f"http://rebinding.example:{receiver.port}/"
        assert WebhookSender(guard).send(claimed(url)).delivered
        assert asked == ["rebinding.example"]
        assert receiver.received[0].headers["host"] == f"rebinding.example:{receiver.port}"
        second = WebhookSender(guard).send(claimed(url))
        assert "is not called" in str(second.reason)
        assert len(receiver.received) == 1


def test_a_name_that_is_public_first_and_private_then_is_not_called() -> None:
    """It was public when the webhook was made."""
    answers = iter([["93.184.216.34"], ["127.0.0.1"]])
    guard = AddressGuard(resolver=lambda host, port: next(answers))
    assert guard.addresses("rebinding.example", 443) == ["93.184.216.34"]
    with receiving(tls=True) as receiver:
        url = f"https://rebinding.example:{receiver.port}/"
        attempt = WebhookSender(guard).send(claimed(url))
        assert receiver.received == []
    assert "is not called" in str(attempt.reason)


def test_tls_checks_the_name_of_the_url_at_the_address_that_was_checked() -> None:
    guard = AddressGuard(allow_private=True, resolver=lambda host, port: ["127.0.0.1"])

    def trust() -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(CERTIFICATE))

    with receiving(tls=True) as receiver:
        named = f"https://hooks.test:{receiver.port}/"
        assert WebhookSender(guard, tls=trust).send(claimed(named)).delivered
        assert receiver.received[0].headers["host"] == f"hooks.test:{receiver.port}"
        other = f"https://other.test:{receiver.port}/"
        mismatch = WebhookSender(guard, tls=trust).send(claimed(other))
        assert str(mismatch.reason).startswith("TLS: Hostname mismatch")
        stranger = WebhookSender(guard).send(claimed(named))
        assert str(stranger.reason).startswith("TLS: self")
        assert len(receiver.received) == 1


def test_the_next_address_is_tried_where_one_does_not_answer() -> None:
    guard = AddressGuard(
        allow_private=True, resolver=lambda host, port: ["127.0.0.2", *resolve(host, port)]
    )
    with receiving() as receiver:
        attempt = WebhookSender(guard).send(claimed(receiver.url))
    assert attempt.delivered


def test_no_secret_stands_in_what_is_printed() -> None:
    assert SECRET not in repr(claimed("https://a.b/"))
