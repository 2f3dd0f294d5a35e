"""What a rank says of itself, and what of it reaches the launcher."""

import os

import pytest

from nightjar.gpu_worker.shards.activity import Activity, Doing, Sign, last_sign


def test_signs_cross_the_pipe_and_the_last_one_counts() -> None:
    reader, life = os.pipe()
    activity = Activity()
    try:
        activity.give_signs(life)
        assert last_sign(reader) == Sign(Doing.LOADING, 0, 0)
        with activity.command(), activity.waiting(Doing.IDLE):
            activity.exchanges()
            activity.progressed()
            assert last_sign(reader) == Sign(Doing.IDLE, 2, 1)
    finally:
        os.close(reader)  # the thread's next write fails, and it ends


def test_a_launcher_that_closed_its_end_gets_no_sign() -> None:
    reader, life = os.pipe()
    os.close(life)
    assert last_sign(reader) is None
    os.close(reader)


def test_a_rank_whose_device_still_computes_awaits_nothing() -> None:
    """On a GPU it waits for the next command while what it was told is still under way."""
    activity = Activity()
    with activity.waiting(Doing.AWAITING_COMMAND):
        assert activity.sign.doing is Doing.AWAITING_COMMAND
        activity.is_computing = lambda: True
        assert activity.sign.doing is Doing.WORKING
    assert activity.sign.doing is Doing.WORKING


def test_a_command_counts_twice_even_if_it_fails() -> None:
    activity = Activity()

    def fails() -> None:
        with activity.command():
            raise ValueError("no such row")

    with pytest.raises(ValueError, match="no such row"):
        fails()
    assert activity.sign.position == 2


def test_what_was_before_a_load_goes_on_after_it() -> None:
    activity = Activity()
    with activity.loading():
        pass
    assert activity.sign.doing is Doing.LOADING  # it is not ready yet
    with activity.waiting(Doing.AWAITING_COMMAND):
        pass
    with activity.loading():
        assert activity.sign.doing is Doing.LOADING
    assert activity.sign.doing is Doing.WORKING
