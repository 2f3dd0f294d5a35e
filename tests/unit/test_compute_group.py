"""The processes of one model: how they are started, and what is said of one that ends or hangs."""

import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from nightjar.gpu_worker import compute_group
from nightjar.gpu_worker.compute_group import ComputeConfig, ComputeGroup
from nightjar.gpu_worker.shards.exits import EXIT_GROUP_LOST
from tests.processes import wait_until

PATIENCE_S = 60

LIVES = """
import os, sys, time
life = next(int(word[7:]) for word in sys.argv if word.startswith("--life="))
while True:
    os.write(life, b".")
    time.sleep(0.2)
"""
LEAVES = f"import sys, time; time.sleep(0.5); sys.exit({EXIT_GROUP_LOST})"


@dataclass(frozen=True)
class Scripted(ComputeConfig):
    """Ranks that run a script each in the place of a model."""

    scripts: tuple[str, ...] = ()

    def command(self, rank: int, pipe: int) -> list[str]:
        return [sys.executable, "-c", self.scripts[rank]]


def group_of(*scripts: str, late_after_s: float = 1.0) -> ComputeGroup:
    config = Scripted(Path(), shards=len(scripts), rank_late_after_s=late_after_s, scripts=scripts)
    return ComputeGroup(config)


def first_fault(group: ComputeGroup, *, silence_counts: bool = True) -> str:
    """What the group says of the first rank that fails."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        ready = wait(group.watched, 0.2)
        fault = group.fault(ready, silence_counts=silence_counts)
        if fault is not None:
            group.kill(fault)
            group.wait()
            assert group.ending() == fault
            return fault
    raise AssertionError("nothing is said")


def test_a_rank_that_is_killed_is_to_blame_and_not_those_that_leave() -> None:
    group = group_of(LEAVES, LIVES, late_after_s=PATIENCE_S)
    os.kill(group.pids[1], signal.SIGKILL)
    assert first_fault(group) == "of rank 1 was ended by SIGKILL"


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_ranks_that_meet_have_a_directory_for_it(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is killed clears nothing up."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    group = group_of(*[LIVES] * ranks)
    assert len(list(tmp_path.iterdir())) == (ranks > 1)
    group.kill("the test is over")
    group.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_stops_is_told_by_its_silence() -> None:
    group = group_of(LIVES, LIVES)
    wait_until("a sign of life of each", lambda: len(wait(group.watched, 1)) == 2)
    os.kill(group.pids[1], signal.SIGSTOP)
    assert first_fault(group) == "of rank 1 stalled: no sign of life in 1 s"


def test_a_rank_that_keeps_the_others_waiting_is_told_when_they_leave() -> None:
    group = group_of(LEAVES, LIVES, late_after_s=PATIENCE_S)
    assert first_fault(group) == "of rank 1 stalled: the others waited 60 s"


def test_silence_says_nothing_while_nobody_looked_or_a_model_loads() -> None:
    group = group_of(LIVES, LIVES, late_after_s=2.0)
    try:
        for pid in group.pids:
            os.kill(pid, signal.SIGSTOP)
        while ready := wait(group.watched, 0.3):  # what they had written
            assert group.fault(ready, silence_counts=True) is None
        time.sleep(3)
        assert group.fault([], silence_counts=True) is None
        assert [group.fault([], silence_counts=False) for _ in range(9)] == [None] * 9
    finally:
        group.kill("the test is over")
        group.wait()


def test_nothing_is_left_when_a_group_has_ended() -> None:
    group = group_of(LIVES, LIVES)
    descriptors = group.watched
    group.terminate()
    group.wait()
    assert group.watched == []
    for descriptor in descriptors:
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(descriptor)


def test_threads_are_divided_among_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ComputeConfig(Path(), threads=8, shards=4).threads_per_rank == 2
    assert ComputeConfig(Path(), threads=2, shards=4).threads_per_rank == 1
    assert ComputeConfig(Path(), threads=3).threads_per_rank == 3
    assert ComputeConfig(Path()).threads_per_rank is None
    monkeypatch.setattr(compute_group, "_cores", lambda: 6)
    assert ComputeConfig(Path(), shards=2).threads_per_rank == 3


def test_each_rank_sees_its_own_device() -> None:
    config = ComputeConfig(Path("m"), shards=2, devices=("4", "7"))
    assert [config.environment(rank)["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == ["4", "7"]
    assert "--device=cuda" in config.command(1, 3)
    assert "--device=cpu" in ComputeConfig(Path("m"), shards=2).command(1, 3)


def test_a_made_up_engine_has_no_shards() -> None:
    assert ComputeConfig(Path(), engine="fake", shards=4).ranks == 1
