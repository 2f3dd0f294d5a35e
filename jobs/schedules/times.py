"""When a schedule runs: crontab syntax in a time zone.

Where the hour is named, the times are local ones. A local time that does not exist on a day,
because clocks go forward, means the next minute that exists. A local time that comes twice, because
clocks go back, means the first of the two. Where the hour is `*`, a schedule goes by real time: it
runs in both of the hours that have the same name.
"""

import difflib
import re
from bisect import bisect_left
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo, available_timezones

from nightjar.jobs.schedule_records import Definition

if TYPE_CHECKING:
    from cronsim import CronSim

MOST_CHARACTERS = 100
MOST_MISSED = 1_000
"""Planned times before the last one are counted up to this number."""

_FIELDS = {
    "minute": "0 to 59",
    "hour": "0 to 23",
    "day-of-month": "1 to 31, or L for the last day",
    "month": "1 to 12, or JAN to DEC",
    "day-of-week": "0 to 7, where 0 and 7 are Sunday, or SUN to SAT",
}
_ALL_HOURS = frozenset(range(24))
_MINUTE = timedelta(minutes=1)
_ZONE = re.compile(r"[A-Za-z0-9_+/-]{1,64}")
# Looked back over, one after the other, to find the last planned time.
_WINDOWS = tuple(timedelta(hours=2**power) for power in range(20))


class ScheduleError(ValueError):
    """A schedule cannot be used; `field` is the one at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Timetable:
    """The planned times of a schedule. All moments are in UTC.

    Raises:
        ScheduleError: The cron line or the time zone cannot be used.
    """

    cron: str
    time_zone: str = "UTC"

    def __post_init__(self) -> None:
        _open(self.cron, datetime.now(UTC).replace(tzinfo=None))
        zone_of(self.time_zone)

    def after(self, moment: datetime) -> datetime | None:
        """The first planned time after a moment; None if there is none in 50 years."""
        zone = zone_of(self.time_zone)
        local = moment.astimezone(zone)
        times = _open(self.cron, local.replace(tzinfo=None))
        if times.hours >= _ALL_HOURS:
            return self._by_real_time(moment, zone)
        for found in times:
            planned = _existing(found.replace(tzinfo=zone), zone)
            if planned > moment:
                return planned
        return None

    def _by_real_time(self, moment: datetime, zone: ZoneInfo) -> datetime | None:
        """The first minute that matches; between two changes of the clocks the offset is fixed.

        cronsim itself jumps over a match where clocks go back by half an hour.
        """
        offset = _offset(moment, zone)
        while True:
            local = moment.astimezone(timezone(offset)).replace(tzinfo=None)
            found = next(_open(self.cron, local), None)
            if found is None:
                return None
            planned = found.replace(tzinfo=timezone(offset)).astimezone(UTC)
            if _offset(planned, zone) == offset:
                return planned
            changed = _change_of_clocks(moment, planned, offset, zone)
            moment, offset = changed - _MINUTE, _offset(changed, zone)

    def last(self, first: datetime, moment: datetime) -> tuple[datetime, int]:
        """The last planned time from `first` to `moment`, and how many came before it.

        `first` is a planned time, not after `moment`. At most MOST_MISSED are counted.
        """
        newest, missed = first, 0
        while missed < MOST_MISSED:
            following = self.after(newest)
            if following is None or following > moment:
                return newest, missed
            newest, missed = following, missed + 1
        return max(newest, self._newest(moment) or newest), missed

    def _newest(self, moment: datetime) -> datetime | None:
        """The last planned time up to a moment."""
        for window in _WINDOWS:
            found = self.after(moment - window)
            if found is None or found > moment:
                continue
            while (following := self.after(found)) is not None and following <= moment:
                found = following
            return found
        return None


def next_of(definition: Definition, moment: datetime) -> datetime | None:
    """The first planned time of a schedule after a moment; raises ScheduleError."""
    return Timetable(definition.cron, definition.time_zone).after(moment)


def zone_of(name: str) -> ZoneInfo:
    """The time zone of this name; raises ScheduleError."""
    try:
        if _ZONE.fullmatch(name):
            return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        pass
    near = difflib.get_close_matches(name[:64], sorted(available_timezones()), n=1)
    hint = f"did you mean {near[0]}?" if near else "write one such as Asia/Seoul or UTC"
    raise ScheduleError("time_zone", f"{name[:64]!r} is no time zone; {hint}")


def _open(cron: str, moment: datetime) -> "CronSim":
    """Read the cron line; raises ScheduleError."""
    from cronsim import CronSim, CronSimError  # noqa: PLC0415 - workers do without it

    parts = cron.split()
    if len(cron) > MOST_CHARACTERS or not cron.isascii():
        raise _bad(f"has at most {MOST_CHARACTERS} characters of ASCII")
    if cron.strip().startswith("@"):
        raise _bad(f"{cron.strip()!r} is a nickname; write five fields, such as `0 2 * * *`")
    if len(parts) == 6:
        raise _bad(
            f"{cron!r} has 6 fields; a schedule has no seconds and no year: leave out the field "
            "too many"
        )
    if len(parts) != len(_FIELDS):
        found = "1 field" if len(parts) == 1 else f"{len(parts)} fields"
        raise _bad(f"{cron!r} has {found}; give five: {', '.join(_FIELDS)}")
    try:
        return CronSim(cron, moment)
    except CronSimError as error:
        name = str(error).removeprefix("Bad ")
        if name not in _FIELDS:
            raise _bad(f"{cron!r} cannot be used: {error}") from error
        value = parts[list(_FIELDS).index(name)]
        if name == "day-of-month" and value.isdigit() and 1 <= int(value) <= 31:
            raise _bad(f"{cron!r} never comes: its months have no day {value}") from error
        raise _bad(f"the {name} {value!r} cannot be used; give {_FIELDS[name]}") from error


def _bad(message: str) -> ScheduleError:
    return ScheduleError("cron", message)


def _offset(moment: datetime, zone: ZoneInfo) -> timedelta:
    return moment.astimezone(zone).utcoffset() or timedelta()


def _change_of_clocks(
    before: datetime, after: datetime, offset: timedelta, zone: ZoneInfo
) -> datetime:
    """The minute from which on `offset` does not hold; it does not at `after`."""
    low = before.astimezone(UTC).replace(second=0, microsecond=0)
    minutes = range(int((after - low) / _MINUTE) + 1)
    return low + _MINUTE * bisect_left(
        minutes, True, key=lambda count: _offset(low + _MINUTE * count, zone) != offset
    )


def _existing(local: datetime, zone: ZoneInfo) -> datetime:
    """The moment of a local time in UTC; of one that does not exist, the next minute that does."""
    while (moment := local.astimezone(UTC)).astimezone(zone).replace(
        tzinfo=None, fold=0
    ) != local.replace(tzinfo=None, fold=0):
        local += _MINUTE
    return moment
