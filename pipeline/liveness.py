"""Under what name a worker holds leases, and whether its process is certainly gone.

The name tells in which process table a worker runs and when its process began, so that whoever
shares that table (another process of the same machine, or of the same container) may ask the
kernel instead of waiting for a heartbeat that does not come. For all others, and where there is no
`/proc`, nothing is certain.
"""

import hashlib
import os
import socket
import uuid
from functools import cache
from pathlib import Path

_PROC = Path("/proc")
_ENDED = "ZX"  # states of a process that only waits to be reaped


def owner_name() -> str:
    """A name for a worker in this process, `host:pid:random:table:began`; no two are alike.

    `began` counts clock ticks from the machine's start; it tells processes with one id apart.
    """
    stat = _stat(os.getpid())
    began = "" if stat is None else stat[1]
    parts = [socket.gethostname(), str(os.getpid()), uuid.uuid4().hex[:8], _table(), began]
    return ":".join(parts)


def is_gone(owner: str) -> bool:
    """Whether the kernel says that the process of this name has ended; False if it cannot say."""
    _, _, rest = owner.partition(":")
    try:
        pid, _, table, began = rest.split(":")
        if not table or not began or table != _table():
            return False
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's process, and /proc may hide it
        pass
    except ValueError:  # a name of another version
        return False
    stat = _stat(int(pid))
    return stat is not None and (stat[0] in _ENDED or stat[1] != began)


@cache
def _table() -> str:
    """Which process table this process sees: the machine's boot, the namespace; "" if unknown."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespace = (_PROC / "self/ns/pid").stat().st_ino
        if not (_PROC / str(os.getpid())).exists():  # /proc is of another namespace
            return ""
    except OSError:
        return ""
    return hashlib.blake2b(f"{boot}{namespace}".encode(), digest_size=6).hexdigest()


def _stat(pid: int) -> tuple[str, str] | None:
    """A process's state and the moment it began; None if they are not to be seen."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the command's name in brackets and may hold anything.
    fields = stat.rpartition(")")[2].split()
    return fields[0], fields[19]
