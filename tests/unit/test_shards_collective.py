"""Exchanges between processes: how long a rank waits for the others."""

import os
import subprocess
import sys
from pathlib import Path

PATIENCE_S = 2.0

MEETS = """
import os, pathlib, sys, time, torch
from nightjar.gpu_worker.shards.activity import Activity
from nightjar.gpu_worker.shards.collective import TorchCollective
from nightjar.gpu_worker.shards.process import GroupLostError, GroupMember

rank, patience = int(sys.argv[2]), float(sys.argv[3])
member = GroupMember(rank, 2, pathlib.Path(sys.argv[1]), patience, Activity())
if rank == 1:
    time.sleep(patience + 1)
collective = TorchCollective(member, "cpu")
met = member.activity.sign.position
total = collective.sum(torch.tensor([1.0 + rank])).item()
if rank == 1:
    time.sleep(60)
began = time.monotonic()
try:
    collective.sum(torch.ones(1))
except GroupLostError:
    waited = time.monotonic() - began
    print(total, round(waited), member.activity.sign.position - met, flush=True)
os._exit(0)
"""


def test_a_rank_that_does_not_come_is_waited_for_so_long_and_no_longer(tmp_path: Path) -> None:
    """Connecting may take longer: a rank that still loads is not taken for a dead one.

    And every exchange that a rank enters is counted before it waits.
    """

    def start(rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", MEETS, str(tmp_path / "store"), str(rank), f"{PATIENCE_S}"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    ranks = [start(0), start(1)]
    try:
        said, _ = ranks[0].communicate(timeout=30)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert said.split() == ["3.0", "2", "2"]
