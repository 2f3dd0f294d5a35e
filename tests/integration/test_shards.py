"""Shards in processes of their own: the same answers, and what happens when a rank fails."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.numpy import save

from nightjar.checkpoints import ModelDirectory
from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.compute import messages
from nightjar.gpu_worker.models import load_model
from nightjar.gpu_worker.worker.compute_group import program
from nightjar.gpu_worker.worker.flights import ComputeLostError, InFlight, LauncherError
from nightjar.gpu_worker.worker.launcher import Launcher
from nightjar.jobs.vector_records import VectorFile
from nightjar.requests import GenerateRequest, SamplingParams
from tests.families import CASES, save_family
from tests.processes import all_ended, wait_until
from tests.shards import answers, assert_same, every_kind, first_logits, process_ranks

PATIENCE_S = 120
NOTICED_S = 10.0
VECTORS = {"v@1": VectorFile(save({"v": np.ones((2, 32), np.float32)}))}


@pytest.mark.parametrize(
    ("family", "ranks"), [("gpt2", 2), pytest.param("llama", 4, marks=pytest.mark.slow)]
)
def test_processes_answer_as_the_whole_model(tiny_model, tmp_path, family, ranks, one_thread):
    """Llama's two key-value heads are held twice by four ranks."""
    path = tiny_model if family == "gpt2" else save_family(tmp_path / "m", CASES[family])
    directory = ModelDirectory.open(path)
    token_bytes = directory.tokenizer().token_bytes
    requests = every_kind(directory.config.vocab_size, 70)
    prompts = [list(request.token_ids) for request in requests[:4]]
    whole = load_model(directory, "fp32")
    with process_ranks(directory, ranks) as rank_zero:
        model = rank_zero.load("fp32")
        found = answers(model, token_bytes, requests)
        logits = first_logits(rank_zero.load("fp32"), token_bytes, prompts)
        alone = answers(model, token_bytes, [requests[2]])
    assert_same(found, answers(whole, token_bytes, requests), 2e-5)
    expected = first_logits(whole, token_bytes, prompts)
    largest = float(expected.abs().max())
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * largest)
    # To the last bit: alone, and in company.
    assert alone[2] == found[2]


@pytest.fixture(scope="module")
def launcher(tiny_model: Path) -> Iterator[Launcher]:
    config = ComputeConfig(tiny_model, dtype="fp32", threads=2, shards=2)
    started = Launcher(config, on_failure=print)
    started.wait_ready()
    yield started
    pids = started.pids
    started.close()
    assert not any(map(psutil.pid_exists, pids))


def generate(
    ticket: int, ids: list[int], max_tokens: int, vectors: str | None = None
) -> messages.Generate:
    sampling = SamplingParams(max_tokens, ignore_eos=True)
    return messages.Generate(GenerateRequest(ticket, ids, sampling, vectors))


def ask(launcher: Launcher, count: int = 1, max_tokens: int = 8) -> InFlight:
    """Prompts that begin with prompt vectors, which the next group must know as well."""
    ids = [[512, 513, 9 + n] for n in range(count)]
    return launcher.submit(
        [generate(launcher.next_ticket(), one, max_tokens, "v@1") for one in ids],
        ["v@1"],
        VECTORS,
    )


def text(flight: InFlight) -> bytes:
    (answer,) = told(flight)
    assert isinstance(answer, messages.Generated), answer
    return answer.outputs[0].text


def told(flight: InFlight) -> list[messages.Answer]:
    """All of them, in order."""
    assert flight.done.wait(PATIENCE_S)
    assert flight.lost is None
    return [flight.answers[ticket] for ticket in flight.tickets]


@pytest.mark.parametrize(
    ("sent", "rank", "ending"),
    [
        (signal.SIGKILL, 1, "rank 1 was ended by SIGKILL"),
        pytest.param(signal.SIGSTOP, 0, "rank 0 stalled", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 0, "rank 0 was ended by SIGKILL", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 1, "rank 1 stalled", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_or_hangs_is_noticed_and_the_group_starts_again(
    launcher: Launcher, sent: signal.Signals, rank: int, ending: str
) -> None:
    launcher.wait_ready()
    before = text(ask(launcher))
    pids = launcher.pids
    flight = ask(launcher, count=200, max_tokens=110)
    os.kill(pids[rank], sent)
    began = time.monotonic()
    assert flight.done.wait(PATIENCE_S)
    assert time.monotonic() - began < NOTICED_S
    assert type(flight.lost) is ComputeLostError
    assert ending in str(flight.lost)
    wait_until("the next group", lambda: launcher.pids != pids)
    assert not any(map(psutil.pid_exists, pids))
    launcher.wait_ready()
    assert text(ask(launcher)) == before


SPOILED = """
import pathlib, runpy, sys, time
flag = pathlib.Path(sys.argv.pop(1))
module = sys.argv.pop(1)
from nightjar.gpu_worker.engine.loop import Engine
from nightjar.gpu_worker.models.shard import ShardDecoder

def spoil(owner, name):
    plain = getattr(owner, name)
    def spoiled(*given):
        if flag.exists():
            {fault}
        return plain(*given)
    setattr(owner, name, spoiled)

spoil({where})
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
LOOPS = "\n            ".join(["while True:", "    pass"])
SLEEPS = "time.sleep(1000)"
RAISES = "raise RuntimeError('no such row')"


@dataclass(frozen=True)
class Spoiled:
    """The program of a group: some ranks fail in one function while a file exists."""

    ranks: tuple[int, ...]
    fault: str
    where: str
    flag: Path

    def __call__(self, rank: int) -> list[str]:
        plain = program(rank)
        if rank not in self.ranks:
            return plain
        python, _, module = plain
        script = SPOILED.format(fault=self.fault, where=self.where)
        return [python, "-c", script, str(self.flag), module]


STEP, SUM = "Engine, '_schedule'", "ShardDecoder, '_joined'"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "where", "fault", "ending"),
    [
        (0, STEP, LOOPS, "rank 0 stalled: the others waited 8 s"),
        (1, SUM, RAISES, "rank 1 ended by an error of its own: see the log"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (0, SUM, SLEEPS, "rank 0 stalled: the others waited 8 s"),
                (1, SUM, SLEEPS, "rank 1 stalled: the others waited 8 s"),
                (0, STEP, RAISES, "rank 0 ended by an error of its own: see the log"),
            ]
        ),
    ],
)
def test_a_rank_that_is_well_and_does_not_come_is_noticed(
    tiny_model: Path, tmp_path: Path, rank: int, where: str, fault: str, ending: str
) -> None:
    """Its signs of life go on: it loops or waits before, in or between its part of the steps."""
    flag = tmp_path / "flag"
    config = ComputeConfig(tiny_model, "fp32", threads=2, shards=2)
    launcher = Launcher(config, print, program=Spoiled((rank,), fault, where, flag))
    try:
        launcher.wait_ready()
        before = text(ask(launcher))
        time.sleep(1)  # idle
        pids = launcher.pids
        flag.touch()
        began = time.monotonic()
        flight = ask(launcher)
        assert flight.done.wait(PATIENCE_S)
        assert time.monotonic() - began < NOTICED_S
        assert type(flight.lost) is ComputeLostError
        assert ending in str(flight.lost)
        flag.unlink()
        wait_until("the next group", lambda: launcher.pids != pids)
        assert not any(map(psutil.pid_exists, pids))
        launcher.wait_ready()
        assert text(ask(launcher)) == before
    finally:
        launcher.close()


def test_a_step_may_take_longer_than_a_rank_may_be_late(tiny_model: Path, tmp_path: Path) -> None:
    """All ranks are at work all the time."""
    flag = tmp_path / "flag"
    config = ComputeConfig(tiny_model, "fp32", threads=2, shards=2, rank_late_after_s=1.5)
    launcher = Launcher(config, print, program=Spoiled((0, 1), "time.sleep(2)", SUM, flag))
    try:
        launcher.wait_ready()
        pids = launcher.pids
        flag.touch()
        began = time.monotonic()
        assert text(ask(launcher, max_tokens=1))
        assert time.monotonic() - began > 6
        assert launcher.pids == pids
    finally:
        launcher.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks the system what a process does")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stops_while_it_loads_is_noticed(tiny_model: Path, rank: int) -> None:
    launcher = Launcher(ComputeConfig(tiny_model, "fp32", threads=2, shards=2), on_failure=print)
    try:
        pids = launcher.pids
        os.kill(pids[rank], signal.SIGSTOP)
        began = time.monotonic()
        wait_until("the next group", lambda: launcher.pids != pids)
        assert time.monotonic() - began < NOTICED_S
        assert not any(map(psutil.pid_exists, pids))
        launcher.wait_ready()
    finally:
        launcher.close()


STARTS = """
import os, pathlib, sys, time
from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.worker.compute_group import ComputeGroup
group = ComputeGroup(ComputeConfig(pathlib.Path(sys.argv[1]), shards=2))
print(*group.pids, flush=True)
time.sleep(1000)
"""


@pytest.mark.slow  # test_children.py has it of other processes
@pytest.mark.skipif(sys.platform != "linux", reason="the system ends a process with its parent")
def test_ranks_that_stopped_while_they_loaded_end_with_their_worker(
    tiny_model: Path, tmp_path: Path
) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", STARTS, str(tiny_model)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert worker.stdout is not None
    ranks = [psutil.Process(int(pid)) for pid in worker.stdout.readline().split()]
    for rank in ranks:
        maps = Path(f"/proc/{rank.pid}/maps")
        wait_until("torch to be loaded", lambda maps=maps: "libtorch" in maps.read_text())
        rank.suspend()
    worker.kill()
    worker.wait()
    worker.stdout.close()
    wait_until("the ranks to end", lambda: all_ended(ranks))


@pytest.mark.slow
def test_a_second_group_works_beside_the_first(launcher: Launcher, tiny_model: Path) -> None:
    launcher.wait_ready()
    config = ComputeConfig(tiny_model, dtype="fp32", threads=2, shards=2)
    other = Launcher(config, on_failure=print)
    try:
        other.wait_ready()
        flights = [ask(one, count=8, max_tokens=40) for one in (launcher, other)]
        first, second = map(told, flights)
        assert [one.outputs for one in first] == [one.outputs for one in second]
    finally:
        other.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"shards": 3}, r"3 shards.*4 attention heads.*possible are 1, 2, 4"),
        ({"shards": 2, "devices": ("0", "1")}, r"CUDA device 0 is not there.*NIGHTJAR_DEVICES"),
    ],
)
def test_what_cannot_be_split_or_placed_is_told_once(
    tiny_model: Path, config: dict[str, object], fault: str
) -> None:
    if "devices" in config and torch.cuda.is_available():
        pytest.skip("the devices are there")
    failures: list[str] = []
    launcher = Launcher(ComputeConfig(tiny_model, **config), on_failure=failures.append)
    with pytest.raises(LauncherError, match=fault):
        launcher.wait_ready()
    launcher.close()
    assert len(failures) == 1
