"""Windows over ranks in processes of their own, over gloo; CUDA kernels run on the CPU."""

import os
import signal
import sys
import time
from dataclasses import replace

import psutil
import pytest

from nightjar.checkpoints import ModelDirectory
from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.compute import messages
from nightjar.gpu_worker.engine import Engine, EngineConfig
from nightjar.gpu_worker.models import load_model
from nightjar.gpu_worker.shards.commands import Forward, Window
from nightjar.gpu_worker.shards.rank_zero import RankZero
from nightjar.gpu_worker.worker.compute_group import program
from nightjar.gpu_worker.worker.flights import ComputeLostError
from nightjar.gpu_worker.worker.launcher import Launcher
from nightjar.kernels.cuda import launch
from nightjar.requests import GenerateRequest, SamplingParams
from tests.engine_cuda.models import GPU_TINY
from tests.engine_cuda.requests import CACHE, prompt, tokens
from tests.engines import assert_nothing_held, drain, generate, run
from tests.kernels_cuda.conftest import host  # noqa: F401
from tests.kernels_cuda.devices import run_on_host
from tests.models import save_gpt2
from tests.processes import wait_until
from tests.shards import process_ranks

NOTICED_S = 10.0
PATIENCE_S = 120

ON_HOST = """
import runpy, sys
from nightjar.kernels.cuda import launch
from tests.kernels_cuda.devices import run_on_host
module = sys.argv.pop(1)
with launch.using(run_on_host):
    runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
"""Runs a module whose kernels are CUDA's, on the CPU."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return ModelDirectory.open(save_gpt2(tmp_path_factory.mktemp("split") / "gpt", GPU_TINY))


def requests():
    kinds = (
        {},
        {"temperature": 0.9, "seed": 4, "top_k": 30},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "stop": (b"e",)},
        {"temperature": 1.1, "seed": 5, "top_p": 0.9, "n": 2},
    )
    return [generate(i, prompt(3 + 9 * i, i), 8 + i, **kind) for i, kind in enumerate(kinds)]


def test_windows_of_processes_write_what_one_process_and_single_steps_write(
    host,  # noqa: F811
    directory,
    monkeypatch,
    one_thread,
):
    """While a window runs, rank 0 sends no frame."""
    told, tell = [], RankZero.tell
    monkeypatch.setattr(RankZero, "tell", lambda one, x: (told.append(x), tell(one, x))[1])
    texts, found = directory.tokenizer().token_bytes, []
    following = "-c", ON_HOST, "nightjar.gpu_worker.shards"
    with launch.using(run_on_host), process_ranks(directory, 2, following) as rank_zero:
        model = rank_zero.load("fp32")
        for steps in (4, 1):
            engine = Engine(model, texts, EngineConfig(**CACHE, window_steps=steps))
            told.clear()
            found.append(drain(engine, *requests()))
            assert engine.windows is not None
            assert_nothing_held(engine)
            windows = [command for command in told if isinstance(command, Window)]
            forwards = sum(isinstance(command, Forward) for command in told)
            if steps == 4:
                assert forwards == 1  # the prompts
                assert 2 < sum(command.steps for command in windows) / len(windows) <= 4
            else:
                assert not windows
                assert forwards == 11
    assert found[0] == found[1]
    with launch.using(run_on_host):
        whole = run(load_model(directory, "fp32"), texts, requests(), **CACHE)
    assert tokens(found[0]) == tokens(whole)


def on_host(rank: int) -> list[str]:
    """The program of a rank in a group."""
    *_, module = program(rank)
    return [sys.executable, "-c", ON_HOST, module]


@pytest.mark.slow
def test_a_group_answers_the_same_in_windows_and_in_single_steps(host, directory):  # noqa: F811
    given = {"dtype": "fp32", "threads": 2, "shards": 2, "kv_cache_bytes": 1 << 23}
    found = []
    for own in ({"window_steps": 1}, {"cuda_graphs": False}):
        launcher = Launcher(ComputeConfig(directory.path, **given, **own), print, program=on_host)
        try:
            launcher.wait_ready()
            asked = [
                messages.Generate(replace(one, request_id=launcher.next_ticket()))
                for one in requests()
            ]
            flight = launcher.submit(asked, [], {})
            assert flight.done.wait(PATIENCE_S)
            found.append([flight.answers[ticket].outputs for ticket in flight.tickets])
        finally:
            launcher.close()
    assert [len(outputs) for outputs in found[0]] == [1, 1, 1, 2]
    assert found[1] == found[0]


@pytest.mark.slow  # test_shards.py has it of single steps
@pytest.mark.parametrize(
    ("sent", "ending"),
    [(signal.SIGKILL, "rank 1 was ended by SIGKILL"), (signal.SIGSTOP, "rank 1 stalled")],
)
def test_a_rank_that_dies_or_hangs_in_a_window_is_noticed_as_before(
    host,  # noqa: F811
    directory,
    sent,
    ending,
):
    config = ComputeConfig(directory.path, "fp32", threads=2, shards=2, kv_cache_bytes=1 << 23)

    def ask(max_tokens):
        sampling = SamplingParams(max_tokens, ignore_eos=True)
        request = GenerateRequest(launcher.next_ticket(), prompt(5), sampling)
        return launcher.submit([messages.Generate(request)], [], {})

    def answer():
        flight = ask(9)
        assert flight.done.wait(PATIENCE_S)
        return flight.answers[flight.tickets[0]].outputs

    launcher = Launcher(config, print, program=on_host)
    try:
        launcher.wait_ready()
        before, pids = answer(), launcher.pids
        flight = ask(180)
        time.sleep(0.3)  # into its windows
        os.kill(pids[1], sent)
        began = time.monotonic()
        assert flight.done.wait(PATIENCE_S)
        assert time.monotonic() - began < NOTICED_S
        assert type(flight.lost) is ComputeLostError
        assert ending in str(flight.lost)
        wait_until("the next group", lambda: launcher.pids != pids)
        assert not any(map(psutil.pid_exists, pids))
        launcher.wait_ready()
        assert answer() == before
    finally:
        launcher.close()
