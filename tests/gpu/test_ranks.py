"""A model split over two GPUs: windows, and recorded steps with NCCL's exchanges in them."""

import json
import subprocess
import sys

import pytest
import torch

from tests.gpu.models import LLAMA, save
from tests.gpu.rank import WAYS
from tests.gpu.sanitizer import ROOT
from tests.kernels_cuda.conftest import host  # noqa: F401

RANKS = 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "where",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_windows_and_graphs_of_ranks_change_no_bit(where, tmp_path, request):
    """On the CPU, gloo's exchanges are not recorded: there the test shows that it works itself."""
    if where == "cpu":
        request.getfixturevalue("host")
    elif torch.cuda.device_count() < RANKS:
        pytest.skip(f"{RANKS} GPUs are needed")
    folder = save(tmp_path / "llama", LLAMA)
    command = sys.executable, "-m", "tests.gpu.rank", str(folder), str(tmp_path / "meeting")
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), where],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [rank.communicate(timeout=500) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, said
    assert not any("cannot record" in errors for _, errors in said), said
    assert not any("cannot be recorded" in errors for _, errors in said), said
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in said)
    assert first == second
    assert list(first) == sorted(WAYS)
    assert first["windows and graphs"] == first["windows"] == first["single steps"]
