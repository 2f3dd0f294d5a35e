"""The threads that compute the CPU kernels: whoever calls, however many, whatever else goes on."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nightjar import kernels
from nightjar.kernels import Norm, native
from nightjar.kernels.native.build import SWITCH
from tests.backends import use_backend

FEATURES = 96


@pytest.fixture(autouse=True)
def _backend(monkeypatch):
    use_backend("native", monkeypatch)


@pytest.fixture(params=["one_loop", "loops_after_loops"])
def compute(request):
    """A kernel over rows [T, FEATURES]: of one loop, or of three that wait for each other."""
    random = torch.Generator().manual_seed(5)
    weight, bias = torch.rand(2, FEATURES, generator=random)
    norm = Norm(weight, bias, 1e-5)
    if request.param == "one_loop":
        return lambda rows: kernels.normalize(rows.clone(), None, norm, torch.float32)
    up = kernels.pack_linear(torch.randn(200, FEATURES, generator=random), None)
    down = kernels.pack_linear(torch.randn(FEATURES, 200, generator=random), None)
    assert native.float_linear.serves(torch.ones(1, 1))
    return lambda rows: kernels.feed_forward(
        rows.clone(), None, norm, up, down, "gelu_tanh", torch.float32
    )


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def rows_of(count, seed=1):
    return torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))


def test_the_number_of_threads_may_change_at_any_time(compute, set_threads):
    rows = rows_of(61)
    set_threads(1)
    expected = compute(rows)
    for threads in (4, 2, 1, 3, 7, 2):
        set_threads(threads)
        for _ in range(3):
            assert torch.equal(compute(rows), expected), threads


def test_no_thread_is_left_sleeping(compute, set_threads):
    """Pauses of all lengths: the others spin, go to sleep this moment, or have long been asleep."""
    rows = rows_of(13)
    set_threads(3)
    expected = compute(rows)
    for turn in range(2_000):
        until = time.perf_counter() + turn % 50 * 5e-6
        while time.perf_counter() < until:
            pass
        if turn % 40 == 0:
            time.sleep(0.001)
        assert torch.equal(compute(rows), expected), turn


def test_callers_at_once_get_what_one_gets(compute, set_threads):
    inputs = [rows_of(20 + seed, seed) for seed in range(4)]
    set_threads(1)
    expected = [compute(rows) for rows in inputs]

    def caller(place):
        torch.set_num_threads(2 + place % 2)
        return [compute(inputs[place]) for _ in range(300)]

    with ThreadPoolExecutor(len(inputs)) as pool:
        for place, results in enumerate(pool.map(caller, range(len(inputs)))):
            assert all(torch.equal(result, expected[place]) for result in results)


def test_who_waits_long_sleeps(compute, set_threads):
    set_threads(3)
    compute(rows_of(40))
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


FORK = """
import os, signal, torch
from nightjar import kernels
from nightjar.kernels import Norm
torch.set_num_threads(2)
norm = Norm(torch.ones(96), torch.zeros(96), 1e-5)
rows = torch.arange(960.0).reshape(10, 96)
expected = kernels.normalize(rows.clone(), None, norm, torch.float32)
child = os.fork()
if child == 0:
    signal.alarm(20)  # a team that waits for threads which are not there
    same = torch.equal(kernels.normalize(rows.clone(), None, norm, torch.float32), expected)
    os._exit(0 if same else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_has_a_team_of_its_own():
    environment = os.environ | {SWITCH: "native"}
    done = subprocess.run([sys.executable, "-c", FORK], env=environment, check=False, timeout=60)
    assert done.returncode == 0
