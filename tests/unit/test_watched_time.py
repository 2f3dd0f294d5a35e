"""How long a process has watched others, where it could not look all the time."""

from nightjar.pipeline.queue.watched_time import WatchedTime


def test_a_long_gap_between_two_looks_counts_little() -> None:
    now = 100.0
    watched = WatchedTime(longest_gap_s=2.0, clock=lambda: now)
    assert watched.seconds == 0
    now += 1.5
    assert watched.seconds == 0  # up to the newest look
    watched.count()
    assert watched.seconds == 1.5
    now += 1000
    watched.count()
    watched.count()
    assert watched.seconds == 3.5
