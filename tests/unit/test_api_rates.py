"""Requests a minute: token buckets, with a clock that is set by hand."""

import pytest

from nightjar.jobs.api import rate_limits
from nightjar.jobs.api.rate_limits import RateLimits
from tests.clock import Clock


def test_a_minutes_requests_may_come_at_once_and_then_evenly() -> None:
    clock = Clock()
    rates = RateLimits(clock)
    taken = [rates.take("owls", 60) for _ in range(61)]
    assert [one.remaining for one in taken[:60]] == list(range(59, -1, -1))
    assert not any(one.retry_after_s for one in taken[:60])
    assert taken[60].retry_after_s == pytest.approx(1.0)
    clock.now += 0.5
    assert rates.take("owls", 60).retry_after_s == pytest.approx(0.5)
    clock.now += 0.5
    assert rates.take("owls", 60).retry_after_s == 0
    assert rates.take("owls", 60).retry_after_s == pytest.approx(1.0)
    clock.now += 3_600
    assert rates.take("owls", 60).remaining == 59  # no more than a minute's are saved up


def test_tenants_have_buckets_of_their_own_and_a_new_limit_counts_at_once() -> None:
    rates = RateLimits(Clock())
    assert rates.take("owls", 1).retry_after_s == 0
    assert rates.take("owls", 1).retry_after_s == pytest.approx(60.0)
    assert rates.take("bats", 1).retry_after_s == 0
    assert rates.take("owls", 2).retry_after_s == 0
    assert rates.take("owls", 0).retry_after_s == 60


def test_the_headers_are_those_of_openai() -> None:
    rates = RateLimits(Clock())
    assert rates.take("owls", 7).headers() == {
        "x-ratelimit-limit-requests": "7",
        "x-ratelimit-remaining-requests": "6",
        "x-ratelimit-reset-requests": "9s",
    }
    for _ in range(6):
        rates.take("owls", 7)
    told = rates.take("owls", 7).headers()
    assert (told["retry-after"], told["retry-after-ms"]) == ("9", "8572")
    assert told["x-ratelimit-remaining-requests"] == "0"


def test_buckets_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "MOST_BUCKETS", 2)
    rates = RateLimits(Clock())
    for name in ("a", "b", "a", "c"):
        rates.take(name, 2)
    assert rates.take("a", 2).retry_after_s > 0  # kept: it was used after b
    assert rates.take("b", 2).remaining == 1  # begins anew
