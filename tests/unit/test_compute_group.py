"""The processes of one model: how they are started, and what is said of one that ends or hangs."""

import os
import signal
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

import nightjar.compute_config
from nightjar.checkpoints import ShardError
from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.shards import startup
from nightjar.gpu_worker.shards.exits import EXIT_FAILED, EXIT_GROUP_LOST
from nightjar.gpu_worker.worker import configuration
from nightjar.gpu_worker.worker.compute_group import ComputeGroup
from nightjar.gpu_worker.worker.configuration import compute_config
from nightjar.gpu_worker.worker.rank_environment import environment
from nightjar.pipeline.settings import Settings, SettingsError
from tests.processes import wait_until

PATIENCE_S = 60

START = """
import os, signal, sys, time
from nightjar.gpu_worker.shards.activity import Doing
from nightjar.gpu_worker.shards import startup
from nightjar.gpu_worker.shards.process import GroupMember
activity = GroupMember.of(startup.decode(sys.argv[1:])).activity
"""
LIVES = START + "time.sleep(100)"
IDLE = START + "activity._doing = Doing.IDLE; time.sleep(100)"
AWAITS = START + "activity._doing = Doing.AWAITING_COMMAND; time.sleep(100)"
WORKS = START + "activity._doing = Doing.WORKING; activity.exchanges(); time.sleep(100)"
IS_AHEAD = (
    START
    + """
activity._doing = Doing.WORKING
for _ in range(3):
    activity.exchanges()
time.sleep(100)
"""
)
GOES_ON = (
    START
    + """
activity._doing = Doing.WORKING
while True:
    activity.progressed()
    time.sleep(0.1)
"""
)
LEAVES = f"import sys, time; time.sleep(0.5); sys.exit({EXIT_GROUP_LOST})"
FAILS = f"import sys, time; time.sleep(0.5); sys.exit({EXIT_FAILED})"


def group_of(*scripts: str, late_after_s: float = 1.0) -> ComputeGroup:
    """Ranks that run a script each instead of a model."""
    config = ComputeConfig(Path(), shards=len(scripts), rank_late_after_s=late_after_s)
    return ComputeGroup(config, lambda rank: [sys.executable, "-c", scripts[rank]])


def first_fault(group: ComputeGroup) -> str:
    """What the group says of the first rank that fails."""
    fault = fault_within(group, PATIENCE_S)
    assert fault is not None
    group.kill(fault)
    group.wait()
    assert group.ending() == fault
    return fault


def fault_within(group: ComputeGroup, seconds: float) -> str | None:
    """What the group says in so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        fault = group.fault(wait(group.watched, 0.2))
        if fault is not None:
            return fault
    return None


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


@pytest.mark.parametrize("sent", [signal.SIGABRT, signal.SIGUSR1], ids=["aborted", "left"])
def test_a_rank_that_gives_up_on_another_is_not_to_blame(sent: signal.Signals) -> None:
    """NCCL's watchdog aborts it, gloo lets it leave; one that others wait for is behind."""
    leaves = f"signal.signal(signal.SIGUSR1, lambda *_: os._exit({EXIT_GROUP_LOST}))\n"
    group = group_of(IS_AHEAD.replace("for _", f"{leaves}for _"), WORKS, late_after_s=4.0)
    while group._members[1].late_s <= 2:
        assert fault_within(group, 0.1) is None
    os.kill(group.pids[0], sent)
    assert first_fault(group) == "of rank 1 stalled: the others waited 4 s"


def test_of_several_late_ranks_the_one_that_is_behind_is_to_blame() -> None:
    """The other waits for it, too."""
    group = group_of(IS_AHEAD.replace("range(3)", "range(9)"), IS_AHEAD, WORKS)
    try:
        while [member.sign.position for member in group._members] != [9, 3, 1]:
            group.fault(wait(group.watched, 1))
        assert group._late(group._members[1:]) == "of rank 2 stalled: the others waited 1 s"
    finally:
        group.kill("the test is over")
        group.wait()


def test_a_rank_that_aborts_while_nobody_is_late_is_to_blame() -> None:
    aborts = START + "time.sleep(0.5); os.abort()"
    assert first_fault(group_of(WORKS, aborts)) == "of rank 1 was ended by SIGABRT"


def test_a_rank_that_leaves_while_nobody_is_late_speaks_for_itself() -> None:
    group = group_of(LEAVES, LIVES, late_after_s=PATIENCE_S)
    assert first_fault(group) == "of rank 0 lost the others: see the log"


@pytest.mark.parametrize(
    ("scripts", "rank"),
    [
        ((IS_AHEAD, WORKS), 1),
        pytest.param((WORKS, IS_AHEAD), 0, marks=pytest.mark.slow),
        ((IS_AHEAD, WORKS, IS_AHEAD), 1),
        ((WORKS, AWAITS), 0),
        pytest.param((WORKS, AWAITS, IS_AHEAD), 0, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_stands_still_is_late_while_another_waits_for_it(
    scripts: tuple[str, ...], rank: int
) -> None:
    """In a command that another has gone on with; rank 0 also while others await one."""
    assert first_fault(group_of(*scripts)) == f"of rank {rank} stalled: the others waited 1 s"


@pytest.mark.parametrize(
    "scripts",
    [
        (WORKS, WORKS),
        (IDLE, AWAITS),
        (LIVES, AWAITS),
        (IS_AHEAD, AWAITS.replace("AWAITING_COMMAND", "LOADING")),
        (GOES_ON, AWAITS),
    ],
    ids=["all compute", "nothing to do", "rank 0 loads", "rank 1 loads", "rank 0 moves on"],
)
def test_nobody_is_late_whom_nobody_waits_for(scripts: tuple[str, ...]) -> None:
    group = group_of(*scripts)
    try:
        assert fault_within(group, 3) is None
    finally:
        group.kill("the test is over")
        group.wait()


@pytest.mark.parametrize("status", [0, EXIT_GROUP_LOST])
def test_a_rank_that_met_an_error_is_told_from_those_that_leave(status: int) -> None:
    """Whichever end is noticed first; one that follows leaves with 0 when rank 0's pipe closes."""
    leaves = LEAVES.replace(f"{EXIT_GROUP_LOST}", f"{status}").replace("0.5", "0.2")
    said = first_fault(group_of(leaves, FAILS, late_after_s=PATIENCE_S))
    assert said == "of rank 1 ended by an error of its own: see the log"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_stops_while_it_loads_is_told_from_one_that_is_busy() -> None:
    """A process that reads and never lets go of Python's lock is silent as well."""
    busy = "import re; re.match('(a+)+$', 'a' * 40 + 'b')"
    group = group_of(busy, LIVES, late_after_s=2.0)
    assert fault_within(group, 4) is None
    os.kill(group.pids[1], signal.SIGSTOP)
    assert first_fault(group) == "of rank 1 stalled: no sign of life in 2 s"


def test_silence_says_nothing_while_nobody_looked() -> None:
    group = group_of(AWAITS, AWAITS, late_after_s=2.0)
    wait_until("a sign of life of each", lambda: len(wait(group.watched, 1)) == 2)
    try:
        for pid in group.pids:
            os.kill(pid, signal.SIGSTOP)
        while ready := wait(group.watched, 0.3):  # what they had written
            assert group.fault(ready) is None
        time.sleep(3)
        assert group.fault([]) is None
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
    monkeypatch.setattr(nightjar.compute_config, "usable_cores", lambda: 6)
    assert ComputeConfig(Path(), shards=2).threads_per_rank == 3


@pytest.mark.parametrize(
    ("inherited", "seen"),
    [
        (None, ["2", "0"]),
        ("4,7,5", ["5", "4"]),
        ("GPU-8932f937, GPU-46451c43 ,MIG-3f1a", ["MIG-3f1a", "GPU-8932f937"]),
    ],
)
def test_each_rank_sees_its_own_device_of_those_that_its_worker_sees(
    monkeypatch: pytest.MonkeyPatch, inherited: str | None, seen: list[str]
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if inherited is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", inherited)
    config = ComputeConfig(Path("m"), shards=2, devices=("2", "0"))
    ranks = [environment(config, rank) for rank in (0, 1)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in ranks] == seen
    assert {one["CUDA_DEVICE_ORDER"] for one in ranks} == {"PCI_BUS_ID"}


@pytest.mark.parametrize(("inherited", "count"), [("3,5", 2), ("", 0), ("0,1,-1,2", 2), ("-1", 0)])
def test_a_device_that_the_worker_does_not_see_is_refused(
    monkeypatch: pytest.MonkeyPatch, inherited: str, count: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", inherited)
    config = ComputeConfig(Path("m"), shards=2, devices=("0", "2"))
    with pytest.raises(ShardError, match=f"device 2: .*={inherited} shows {count} devices"):
        environment(config, 1)


def test_ranks_are_told_the_kind_of_their_device() -> None:
    config = ComputeConfig(Path("m"), shards=2, devices=("4", "7"))
    assert config.rank_device == "cuda"
    assert ComputeConfig(Path("m"), shards=2).rank_device == "cpu"


def test_each_rank_is_told_the_same_and_its_own_rank(tmp_path: Path) -> None:
    tells = "import sys, pathlib; pathlib.Path({!r}).write_text(sys.argv[1])"
    told = [tmp_path / "0", tmp_path / "1"]
    config = ComputeConfig(tmp_path, threads=2, shards=2, cuda_prefetch=False)
    group = ComputeGroup(config, lambda rank: [sys.executable, "-c", tells.format(str(told[rank]))])
    first_fault(group)
    group.wait()
    starts = [startup.decode([path.read_text(encoding="utf-8")]) for path in told]
    assert [start.config for start in starts] == [config, config]
    assert [start.rank for start in starts] == [0, 1]
    assert [len(start.followers) for start in starts] == [1, 0]
    assert {start.worker for start in starts} == {os.getpid()}
    assert starts[0].meeting == starts[1].meeting is not None


def test_a_worker_starts_what_its_settings_say() -> None:
    """Every field has its setting but one, which nobody sets."""
    given = {
        "dtype": "bf16",
        "kv_cache_bytes": 5,
        "gpu_memory_share": 0.5,
        "host_cache_bytes": 6,
        "prompt_vector_bytes": 11,
        "compute_threads": 7,
        "compute_stalled_after_s": 8.0,
        "engine": "fake",
        "fake_step_s": 9.0,
        "devices": "1,3",
        "rank_late_after_s": 10.0,
        "window_steps": 1,
        "cuda_graphs": False,
        "cuda_prefetch": False,
        "cuda_small_products": False,
        "cuda_fused_heads": False,
    }
    assert compute_config(Settings.read(**given), Path("m")) == ComputeConfig(
        model=Path("m"),
        dtype="bf16",
        kv_cache_bytes=5,
        gpu_memory_share=0.5,
        host_cache_bytes=6,
        prompt_vector_bytes=11,
        threads=7,
        stalled_after_s=8.0,
        engine="fake",
        fake_step_s=9.0,
        shards=2,
        devices=("1", "3"),
        rank_late_after_s=10.0,
        window_steps=1,
        cuda_graphs=False,
        cuda_prefetch=False,
        cuda_small_products=False,
        cuda_fused_heads=False,
    )
    assert compute_config(Settings.read(device="cuda:1"), Path("m")).device == "cuda:1"


def test_models_of_one_worker_divide_its_memory_and_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"kv_cache_bytes": 100, "host_cache_bytes": 10, "compute_threads": 7}
    given |= {"prompt_vector_bytes": 12}
    config = compute_config(Settings.read(**given), Path("m"), models=3)
    assert (config.kv_cache_bytes, config.host_cache_bytes, config.threads) == (33, 3, 2)
    assert config.prompt_vector_bytes == 4
    monkeypatch.setattr(configuration, "usable_cores", lambda: 6)
    config = compute_config(Settings.read(), Path("m"), models=2)
    assert (config.kv_cache_bytes, config.host_cache_bytes, config.threads) == (1 << 29, 0, 3)
    assert compute_config(Settings.read(), Path("m"), models=9).threads == 1
    for gpu in ({"device": "cuda"}, {"devices": "0"}):
        with pytest.raises(SettingsError, match="NIGHTJAR_KV_CACHE_BYTES is not set: several"):
            compute_config(Settings.read(**gpu), Path("m"), models=2)
        of_gpu = Settings.read(**gpu, kv_cache_bytes=100)
        assert compute_config(of_gpu, Path("m"), models=2).kv_cache_bytes == 50
        assert compute_config(Settings.read(**gpu), Path("m")).kv_cache_bytes is None
        assert compute_config(Settings.read(**gpu, engine="fake"), Path("m"), models=2)


def test_a_made_up_engine_has_no_shards() -> None:
    assert ComputeConfig(Path(), engine="fake", shards=4).ranks == 1
