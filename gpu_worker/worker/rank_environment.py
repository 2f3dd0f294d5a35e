"""The environment variables of a compute process: its threads, its network, its device."""

import os
import sys

from nightjar.checkpoints import ShardError
from nightjar.compute_config import ComputeConfig

_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_DEFAULTS = {
    # OpenMP threads that spin while they wait take the cores from the processes beside them. On two
    # busy cores, decode ran eight times slower.
    "OMP_WAIT_POLICY": "PASSIVE",
    # All ranks of a group run on one machine; no other machine can reach their traffic.
    "GLOO_SOCKET_IFNAME": _LOOPBACK,
    "NCCL_SOCKET_IFNAME": _LOOPBACK,
    # By default, torch's NCCL watchdog writes a dump for up to a minute before it ends a process
    # that has waited too long.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    # Number devices as nvidia-smi does. By default, CUDA counts the fastest first.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def environment(config: ComputeConfig, rank: int) -> dict[str, str]:
    """Return a rank's environment; with `devices`, the rank sees only its own device.

    What this process's environment says takes precedence over the defaults.

    Raises:
        ShardError: This process sees fewer devices.
    """
    own = {_VISIBLE: _visible(int(config.devices[rank]))} if config.devices else {}
    return _DEFAULTS | os.environ | own


def _visible(number: int) -> str:
    """Return CUDA's name of the device with this number among those that this process sees."""
    listed = os.environ.get(_VISIBLE)
    if listed is None:
        return f"{number}"
    # Numbers, or the names of devices and of their parts. CUDA ignores what follows a -1.
    names = [name.strip() for name in listed.split(",")]
    names = names[: names.index("-1")] if "-1" in names else [name for name in names if name]
    if number >= len(names):
        raise ShardError(
            f"device {number}: {_VISIBLE}={listed} shows {len(names)} devices to this process, and "
            "NIGHTJAR_DEVICES (--devices) counts those from 0"
        )
    return names[number]
