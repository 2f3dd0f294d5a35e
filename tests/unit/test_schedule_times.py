"""Planned times against a reference that looks at every minute of the local clock."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightjar.jobs.schedules.times import MOST_MISSED, ScheduleError, Timetable, zone_of

MINUTE = timedelta(minutes=1)


def planned(cron: str, zone: str, begin: datetime, count: int) -> list[str]:
    """The next planned times, as the local clock shows them."""
    times, found, moment = Timetable(cron, zone), [], begin
    for _ in range(count):
        moment_or_none = times.after(moment)
        assert moment_or_none is not None
        moment = moment_or_none
        found.append(moment.astimezone(ZoneInfo(zone)).isoformat())
    return found


@pytest.mark.parametrize(
    ("zone", "cron", "begin", "expected"),
    [
        # 02:30 does not exist on March 29th: it runs at 03:00, once.
        (
            "Europe/Berlin",
            "30 2 * * *",
            datetime(2026, 3, 28, 12, tzinfo=UTC),
            ["2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"],
        ),
        # Three times of one hour that does not exist are one run.
        (
            "Europe/Berlin",
            "*/20 2 * * *",
            datetime(2026, 3, 28, 12, tzinfo=UTC),
            ["2026-03-29T03:00:00+02:00", "2026-03-30T02:00:00+02:00"],
        ),
        # 02:30 comes twice on October 25th: it runs the first time.
        (
            "Europe/Berlin",
            "30 2 * * *",
            datetime(2026, 10, 24, 12, tzinfo=UTC),
            ["2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"],
        ),
        # Every hour means every real hour.
        (
            "Europe/Berlin",
            "30 * * * *",
            datetime(2026, 10, 24, 23, 0, tzinfo=UTC),
            [
                "2026-10-25T01:30:00+02:00",
                "2026-10-25T02:30:00+02:00",
                "2026-10-25T02:30:00+01:00",
                "2026-10-25T03:30:00+01:00",
            ],
        ),
        # Clocks go forward by half an hour.
        (
            "Australia/Lord_Howe",
            "15 2 * * *",
            datetime(2026, 10, 3, 0, tzinfo=UTC),
            ["2026-10-04T02:30:00+11:00", "2026-10-05T02:15:00+11:00"],
        ),
        # Clocks go back by half an hour: 01:30 comes twice.
        (
            "Australia/Lord_Howe",
            "30 * * * *",
            datetime(2026, 4, 4, 14, 0, tzinfo=UTC),
            [
                "2026-04-05T01:30:00+11:00",
                "2026-04-05T01:30:00+10:30",
                "2026-04-05T02:30:00+10:30",
            ],
        ),
        # Midnight does not exist.
        (
            "America/Santiago",
            "0 0 * * *",
            datetime(2026, 9, 5, 12, tzinfo=UTC),
            ["2026-09-06T01:00:00-03:00", "2026-09-07T00:00:00-03:00"],
        ),
        # A whole day was left out.
        (
            "Pacific/Apia",
            "0 12 30 12 *",
            datetime(2011, 6, 1, tzinfo=UTC),
            ["2011-12-31T00:00:00+14:00", "2012-12-30T12:00:00+14:00"],
        ),
        (
            "Asia/Seoul",
            "0 2 * * 1-5",
            datetime(2026, 11, 20, tzinfo=UTC),
            ["2026-11-23T02:00:00+09:00"],
        ),
    ],
)  # fmt: skip
def test_daylight_saving(zone: str, cron: str, begin: datetime, expected: list[str]) -> None:
    assert planned(cron, zone, begin, len(expected)) == expected


def reference(
    minutes: set[int], hours: set[int], zone: ZoneInfo, day: datetime, days: int
) -> Iterator[datetime]:
    """Each local minute of some days that is asked for, as the moment at which it runs."""
    every = hours == set(range(24))
    seen: set[datetime] = set()
    if every:  # by real time
        for number in range(days * 1440):
            moment = day.replace(tzinfo=zone).astimezone(UTC) + number * MINUTE
            if moment.astimezone(zone).minute in minutes:
                yield moment
        return
    for number in range(days * 1440):
        local = day + number * MINUTE
        if local.hour not in hours or local.minute not in minutes:
            continue
        probe = local
        while True:  # the next local minute that is on the clock
            moment = probe.replace(tzinfo=zone, fold=0).astimezone(UTC)
            if moment.astimezone(zone).replace(tzinfo=None) == probe:
                break
            probe += MINUTE
        if moment not in seen:
            seen.add(moment)
            yield moment


@settings(max_examples=60, deadline=None)
@given(
    minutes=st.sets(st.integers(0, 59), min_size=1, max_size=4),
    hours=st.one_of(st.sets(st.integers(0, 23), min_size=1, max_size=5), st.just(set(range(24)))),
    zone=st.sampled_from(
        ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Santiago", "UTC"]
    ),
    day=st.sampled_from(
        [(2026, 3, 8), (2026, 3, 29), (2026, 10, 25), (2026, 11, 1), (2026, 4, 5), (2026, 10, 4),
         (2026, 9, 6), (2026, 4, 4), (2026, 7, 1)]
    ),
)  # fmt: skip
def test_times_are_those_of_the_reference(
    minutes: set[int], hours: set[int], zone: str, day: tuple[int, int, int]
) -> None:
    begin = datetime(*day) - timedelta(days=1)
    expected = list(reference(minutes, hours, ZoneInfo(zone), begin, 3))
    told = "*" if len(hours) == 24 else ",".join(map(str, sorted(hours)))
    times = Timetable(f"{','.join(map(str, sorted(minutes)))} {told} * * *", zone)
    found, moment = [], begin.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC) - MINUTE
    while (following := times.after(moment)) is not None and following <= expected[-1]:
        found.append(following)
        moment = following
    assert found == sorted(expected)


@given(st.datetimes(datetime(2025, 1, 1), datetime(2027, 1, 1)))
def test_a_time_comes_after_every_moment_before_it(moment: datetime) -> None:
    """Also in the hour that comes twice: no moment skips a planned time or finds it again."""
    times = Timetable("30 2,3 * * *", "Europe/Berlin")
    begin = moment.replace(tzinfo=UTC)
    found = times.after(begin)
    assert found is not None
    assert found > begin
    assert times.after(found - MINUTE) == found
    assert times.after(begin + (found - begin) / 2) == found


def test_the_last_planned_time_and_what_was_missed_before_it() -> None:
    times = Timetable("0 2 * * *")
    first = datetime(2026, 11, 20, 2, tzinfo=UTC)
    assert times.last(first, first) == (first, 0)
    assert times.last(first, first + timedelta(days=3, hours=5)) == (first + timedelta(days=3), 3)
    often = Timetable("* * * * *")
    moment = first + timedelta(days=500, seconds=30)
    assert often.last(first, moment) == (moment.replace(second=0), MOST_MISSED)
    rare = Timetable("* * 1 1 *")
    assert rare.last(datetime(2020, 1, 1, tzinfo=UTC), moment)[0] == datetime(
        2028, 1, 1, 23, 59, tzinfo=UTC
    )


@pytest.mark.parametrize(
    ("cron", "told"),
    [
        ("0 0 2 * * *", "has 6 fields; a schedule has no seconds and no year"),
        ("0 2 * *", "has 4 fields; give five: minute, hour, day-of-month"),
        ("", "has 0 fields"),
        ("@daily", "is a nickname; write five fields, such as `0 2 * * *`"),
        ("61 2 * * *", "the minute '61' cannot be used; give 0 to 59"),
        ("0 24 * * *", "the hour '24' cannot be used; give 0 to 23"),
        ("0 2 * * MOON", "the day-of-week 'MOON' cannot be used"),
        ("0 2 30 2 *", "never comes: its months have no day 30"),
        ("0 2 0 * *", "the day-of-month '0' cannot be used"),
        ("0 2 * * *" + " " * 100, "at most 100 characters"),
        ("0 2 * * ４", "of ASCII"),
    ],
)
def test_a_cron_line_that_cannot_be_used(cron: str, told: str) -> None:
    with pytest.raises(ScheduleError) as raised:
        Timetable(cron)
    assert told in str(raised.value)
    assert raised.value.field == "cron"


@given(st.text("0123456789*/,-#LWMONJAx ", max_size=30))
def test_any_text_is_a_timetable_or_refused(cron: str) -> None:
    refused = None
    try:
        found = Timetable(cron)
    except ScheduleError as error:
        refused = error.field
    assert refused == "cron" if refused else found.cron == cron


@pytest.mark.parametrize(
    "name", ["Asia/Seul", "../../etc/passwd", "/etc/passwd", "Europe", "", "x" * 99]
)
def test_an_unknown_time_zone(name: str) -> None:
    with pytest.raises(ScheduleError, match="is no time zone"):
        zone_of(name)


def test_a_time_zone_with_a_slip_is_guessed() -> None:
    with pytest.raises(ScheduleError, match=r"did you mean Asia/Seoul\?"):
        Timetable("0 2 * * *", "Asia/Seul")
